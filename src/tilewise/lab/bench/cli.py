"""`tilewise bench`: run, report and compare."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.suites import SUITES


class Group(TyperGroup):
    """Options without a command are those of `run`; nothing at all asks for help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            args = ["--help"]
        elif args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.commands["run"].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


app = typer.Typer(cls=Group, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure attention side by side with its peers.

    `bench --suite NAME` is short for `bench run --suite NAME`.
    """


@app.command()
def run(
    suite: Annotated[str | None, typer.Option(help=f"One of: {', '.join(SUITES)}.")] = None,
    filter: Annotated[
        str | None, typer.Option(help="Run cases whose name this regular expression finds.")
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, or all; tilewise:NAME picks a backend. Default: the suite's."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every sample to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and samples, as many rounds.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds in which the peers take turns; at least 5.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs; default: drawn anew.")] = None,
    budget: Annotated[float | None, typer.Option(help="Start no case after this many seconds.")] = None,
    setup_limit: Annotated[
        float,
        typer.Option(help="Skip a peer in a case that it compiles and warms up for longer.", min=0.0),
    ] = 60.0,
    graph: Annotated[
        bool, typer.Option("--graph", help="Time decoding in CUDA graphs, where no host is in the way.")
    ] = False,
    thread_time: Annotated[
        bool,
        typer.Option("--thread-time", help="On a CPU that others use too: time what one thread computes."),
    ] = False,
) -> None:
    """Check every peer against float64, then time them in turn. Exit status 1 if tilewise is wrong."""
    from tilewise.lab.bench.report import tables
    from tilewise.lab.bench.run import MIN_ROUNDS, Settings, is_sound, plan, run as run_plan

    with one_line_errors():
        if suite is None:
            raise BenchError(f"--suite is missing, must be one of {', '.join(SUITES)}")
        if budget is not None and not 0 < budget < float("inf"):
            raise BenchError(f"--budget {budget} must be a positive finite number of seconds")
        if not setup_limit < float("inf"):
            raise BenchError(f"--setup-limit {setup_limit} must be a finite number of seconds")
        if rounds < MIN_ROUNDS:
            raise BenchError(f"--rounds {rounds} must be at least {MIN_ROUNDS}")
        names = tuple(name.strip() for name in peers.split(",")) if peers else ()
        limits = budget, setup_limit
        settings = Settings(suite, filter, names, quick, rounds, seed, json, *limits, graph, thread_time)
        if suite == "distributed":
            found, speaks = _run_distributed(settings)
        else:
            planned, speaks = plan(settings), True
            with _progress(len(planned.cases)) as step:
                found = run_plan(planned, step)
        if speaks:
            typer.echo(tables(found))
        if speaks and json is not None:
            typer.echo(f"Every sample is in {json}.")
    if not is_sound(found):
        raise typer.Exit(1)


def _run_distributed(settings: Any) -> tuple[Any, bool]:
    """(results, whether this rank speaks of them): the first does."""
    from tilewise.lab.bench.run import find_cases
    from tilewise.lab.distributed.bench import join, leave, run as run_cases

    device, cases = find_cases(settings)
    group = join(device)
    with _progress(len(cases)) if group.rank == 0 else nullcontext() as step:
        found = run_cases(settings, cases, group, step)
    leave()
    return found, group.rank == 0


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Result files.", metavar="FILE...")],
    reference: Annotated[
        Path | None, typer.Option(help="A file of ratios recorded elsewhere, as a column.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw PNG bar charts into this folder.")] = None,
) -> None:
    """Print Markdown tables of result files; draw plots."""
    from tilewise.lab.bench.plot import plots as draw
    from tilewise.lab.bench.report import tables
    from tilewise.lab.bench.results import load

    with one_line_errors():
        loaded = [load(path) for path in files]
        recorded = None if reference is None else load(reference)
        for found in loaded:
            typer.echo(tables(found, recorded))
        if plots is not None:
            for path in itertools.chain.from_iterable(draw(found, plots) for found in loaded):
                typer.echo(f"drew {path}")


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="The earlier result file.", metavar="A.json")],
    new: Annotated[Path, typer.Argument(help="The later one.", metavar="B.json")],
) -> None:
    """Say what got slower beyond the spread. Exit status 1 if anything did."""
    from tilewise.lab.bench.results import compare as judge, load, summarize

    with one_line_errors():
        before, after = load(old), load(new)
        changes = judge(before, after)
        typer.echo(summarize(before, after, changes))
    if any(change.is_regression for change in changes):
        raise typer.Exit(1)


@contextmanager
def one_line_errors(command: str = "bench") -> Iterator[None]:
    try:
        yield
    except BenchError as error:
        print(f"tilewise {command}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on the terminal, and a line for every case that is done; a refusal's reason once."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tilewise.lab.bench.run import describe_record

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, said = progress.add_task("", total=total), set[str]()

        def step(done: int, record: dict[str, Any]) -> None:
            progress.console.print(describe_record(record, said))
            progress.update(task, completed=done)

        yield step
