"""The `tilewise` command: what shows, measures and checks the library, from `lab`."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Entry point of the `tilewise` command."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit("tilewise: the command line needs the 'cli' extra: pip install 'tilewise[cli]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a dash shows a question mark
    try:
        try:
            _app()(prog_name="tilewise")
        finally:
            print(end="", flush=True)
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again
        is_unwanted = isinstance(error, BrokenPipeError)  # as by `| head`
        sys.exit(1 if is_unwanted else f"tilewise: the output cannot be written: {error.strerror}")


def _app():  # type: ignore[no-untyped-def]
    import typer

    app = typer.Typer(
        help="Exact attention, tile by tile.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
    )

    def show_version(is_wanted: bool) -> None:
        if is_wanted:
            from tilewise import __version__

            typer.echo(f"tilewise {__version__}")
            raise typer.Exit

    version = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Print the version and exit."
    )

    @app.callback()
    def root(version: bool = version) -> None:
        """Exact attention, tile by tile."""

    from tilewise.lab.bench.cli import app as bench_app
    from tilewise.lab.claims.command import claims
    from tilewise.lab.demo.command import demo
    from tilewise.lab.distributed.plan import distributed
    from tilewise.lab.doctor import doctor
    from tilewise.lab.heads.command import heads
    from tilewise.lab.learn.command import fp8, learn, pipeline, trace
    from tilewise.lab.learn.cost_commands import io, kv_memory_command, roofline_command
    from tilewise.lab.mask import mask
    from tilewise.lab.tune import tune
    from tilewise.lab.warmup import warmup

    commands = (
        demo, doctor, heads, learn, trace, fp8, pipeline, io, roofline_command, kv_memory_command, mask,
        distributed, claims, tune, warmup,
    )  # fmt: skip
    for command in commands:
        app.command(command.__name__.removesuffix("_command").replace("_", "-"))(command)
    app.add_typer(bench_app, name="bench")
    return app
