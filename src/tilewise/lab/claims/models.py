"""Claims about whole models: training steps and generation, with transformers' own models from configs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilewise.lab.bench.errors import BenchError
from tilewise.lab.claims.attention import in_memory, longest_that
from tilewise.lab.claims.claim import FA1, TUTORIAL, Curves, Measured, Setting, claim
from tilewise.lab.demo.text import sample, standard_library

STEPS = 5
EAGER, SDPA, OURS = "eager", "sdpa", "tilewise"
GPT2 = {"small": (12, 768, 12), "medium": (24, 1024, 16)}  # layers, width, heads
BYTES, GPT2_WORDS, BERT_WORDS = (
    256,
    50_257,
    30_522,
)  # vocabularies: text is of bytes, whatever else a model knows
LARGE, HIDDEN = 24, 0.15  # layers of BERT-large; bytes that are to be guessed
REST = "Attention is a part of the step: what else there is takes as long with any."


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BenchError("needs transformers: pip install 'tilewise[transformers]'") from error
    from tilewise.faces.transformers import register

    register()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _tokens(setting: Setting, batch: int, seqlen: int) -> torch.Tensor:
    """Bytes of real text (batch, seqlen)."""
    text = standard_library()
    return sample(text.train, batch, seqlen, torch.Generator().manual_seed(0))[0].to(setting.device)


def _seconds(step: Callable[[], Any], setting: Setting) -> float:
    start = time.perf_counter()
    step()
    if setting.is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def faster(make: Callable[[str], Callable[[], float]], *peers: str) -> tuple[float, str, Curves]:
    """How many times faster a training step is than in eager attention; what the others and all losses were.

    `make(implementation)` builds the model from one seed and returns its step, which returns the loss.
    `peers`: implementations timed beside SDPA.
    """
    steps = {name: make(name) for name in (EAGER, SDPA, *peers, OURS)}
    losses = {name: [step()] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(STEPS):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name].append(step())  # a number: it waits for the device
            times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(t) for name, t in times.items()}
    others = "".join(f", {name} {median[EAGER] / median[name]:.2f}×" for name in peers)
    ours, apart = losses[OURS], max(abs(a - b) for a, b in zip(losses[OURS], losses[EAGER], strict=True))
    curve = f"loss {ours[0]:.4f} to {ours[-1]:.4f} in {len(ours)} steps, eager's at most {apart:.0e} away"
    curves = {name: {str(n): loss for n, loss in enumerate(found, 1)} for name, found in losses.items()}
    note = f"SDPA {median[EAGER] / median[SDPA]:.2f}×{others}; {curve}"
    return median[EAGER] / median[OURS], note, {"loss": curves}


Build = Callable[[Any, str], Any]  # (transformers, implementation) -> model


def _training_step(
    build: Build, inputs: dict[str, Any], setting: Setting, implementation: str
) -> Callable[[], float]:
    """An AdamW step of a model, in bfloat16 autocast on a GPU; it returns the loss."""
    torch.manual_seed(0)
    model = build(_transformers(), implementation).to(setting.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    def step() -> float:
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.is_gpu):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _training(build: Build, inputs: dict[str, Any], setting: Setting) -> tuple[float, str, Curves]:
    has_flash = setting.is_gpu and _transformers().utils.is_flash_attn_2_available()
    peers = ("flash_attention_2",) if has_flash else ()
    return faster(partial(_training_step, build, inputs, setting), *peers)


def _gpt2(size: str, layers: int, seqlen: int, words: int = GPT2_WORDS) -> Build:
    _, width, heads = GPT2[size]

    def build(transformers: Any, implementation: str) -> Any:
        config = transformers.GPT2Config(
            vocab_size=words, n_positions=seqlen, n_layer=layers, n_embd=width, n_head=heads,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_implementation=implementation,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    return build


def _gpt2_step(size: str, seqlen: int, batch: int) -> Callable[[Setting], Measured]:
    """A step of GPT-2; on a CPU of two layers, or one of long rows, one sequence, and bytes for words."""

    def measure(setting: Setting) -> Measured:
        layers = GPT2[size][0] if setting.is_gpu else 2048 // seqlen or 1
        tokens = _tokens(setting, batch if setting.is_gpu else 1, seqlen)
        inputs = {"input_ids": tokens, "labels": tokens}
        words = GPT2_WORDS if setting.is_gpu else BYTES
        value, note, curves = _training(_gpt2(size, layers, seqlen, words), inputs, setting)
        what = f"{layers} layer{'s' * (layers > 1)} of GPT-2 {size}, {words:,} words, batch {len(tokens)}"
        return Measured(value, f"{what}, beside eager attention", note, curves)

    return measure


for _name, _says, _step, _needs_gpu in (
    ("gpt2-step", "GPT-2 small at 1,024 tokens is 3 times", _gpt2_step("small", 1024, 32), False),
    ("gpt2-step-4k", "GPT-2 small at 4,096 tokens is 3 times", _gpt2_step("small", 4096, 2), False),
    ("gpt2-medium-step", "GPT-2 medium at 1,024 tokens is 3 times", _gpt2_step("medium", 1024, 16), False),
    ("gpt2-medium-step-4k", "GPT-2 medium at 4,096 tokens is 3 times", _gpt2_step("medium", 4096, 2), True),
):
    claim(_name, f"A training step of {_says} faster.", FA1, 3, "×", needs_gpu=_needs_gpu, why=REST)(_step)


MOST_TOKENS = 1 << 17  # of a whole model: its other activations of twice as many fill an H200


@claim(
    "gpt2-context", "GPT-2 small trains on 65,536 tokens on one GPU.", FA1, 65536, "tokens", needs_gpu=True
)
def gpt2_context(setting: Setting) -> Measured:
    """Of bytes: the logits of GPT-2's words would take more memory than all attention."""

    def fits(implementation: str, seqlen: int) -> bool:
        tokens = _tokens(setting, 1, seqlen)
        inputs = {"input_ids": tokens, "labels": tokens}
        build = _gpt2("small", 12, seqlen, BYTES)
        return in_memory(lambda: _training_step(build, inputs, setting, implementation)())

    longest = {name: longest_that(partial(fits, name), MOST_TOKENS) for name in (EAGER, SDPA, OURS)}
    others = ", ".join(f"{name}: {longest[name]:,}" for name in (EAGER, SDPA))
    what = "a step of 12 layers of GPT-2 small, bytes for words, batch 1"
    return Measured(longest[OURS], what, f"{others}; nothing was tried beyond {MOST_TOKENS:,}")


@claim("bert-step", "A training step of BERT-large at 512 tokens is 15% faster.", FA1, 1.15, "×", why=REST)
def bert_step(setting: Setting) -> Measured:
    """The paper's 15% are over the MLPerf 1.1 record, of other code on eight A100: that is not run here."""
    batch, layers, words = (56, LARGE, BERT_WORDS) if setting.is_gpu else (2, 2, BYTES + 1)
    tokens = _tokens(setting, batch, 512)
    kept = torch.linspace(256, 512, batch, device=setting.device).long()
    mask = torch.arange(512, device=setting.device) < kept[:, None]
    drawn = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)).to(setting.device)
    is_hidden = mask & (drawn < HIDDEN)
    inputs = {
        "input_ids": tokens.where(~is_hidden, BYTES),
        "labels": tokens.where(is_hidden, -100),
        "attention_mask": mask.long(),
    }

    def build(transformers: Any, implementation: str) -> Any:
        config = transformers.BertConfig(
            vocab_size=words, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16,
            intermediate_size=4096, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
            attn_implementation=implementation,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)

    value, note, curves = _training(build, inputs, setting)
    padded = f"{1 - float(mask.float().mean()):.0%} padded, {HIDDEN:.0%} to be guessed"
    what = f"{layers} layers of BERT-large, {words:,} words, batch {batch}, {padded}"
    return Measured(value, f"{what}, beside eager attention, not the paper's MLPerf record", note, curves)


@claim(
    "kv-cache-speed", "A KV cache makes generation 5 to 10 times faster.", TUTORIAL, 5, "×",
    why="Without a cache a GPU computes all tokens again in little more time than one, at this length.",
)  # fmt: skip
def kv_cache_speed(setting: Setting) -> Measured:
    """Of a batch that keeps the device busy; on a GPU, one sequence waits for the host either way."""
    prompt, new, layers, batch = (512, 128, 12, 64) if setting.is_gpu else (512, 48, 4, 1)
    torch.manual_seed(0)
    model = _gpt2("small", layers, prompt + new)(_transformers(), OURS)
    model = model.to(setting.device, torch.bfloat16 if setting.is_gpu else None).eval()

    def generate(tokens: torch.Tensor, use_cache: bool) -> Any:
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, use_cache=use_cache, pad_token_id=0,
        )  # fmt: skip

    def gain(batch: int) -> tuple[float, bool]:
        ways = [partial(generate, _tokens(setting, batch, prompt), way) for way in (True, False)]
        same = torch.equal(*(way() for way in ways))
        with_cache, without = (min(_seconds(way, setting) for _ in range(2)) for way in ways)
        return without / with_cache, same

    value, same = gain(batch)
    note = "the same tokens" if same else "tokens differ where two were nearly as likely"
    if batch > 1:
        note += f"; batch 1 {gain(1)[0]:.2f}×"
    return Measured(
        value, f"{new} tokens after {prompt}, {layers} layers of GPT-2 small, batch {batch}", note
    )  # fmt: skip


@claim(
    "fa3-name", "transformers has one name for FlashAttention-2 and -3.", TUTORIAL, 1, "names", "equal",
    why="Each has its own, and neither stands for the other.",
)  # fmt: skip
def fa3_name(setting: Setting) -> Measured:
    known = _transformers().modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()
    names = [name for name in ("flash_attention_2", "flash_attention_3") if name in known]
    return Measured(
        len(names), "`attn_implementation` in transformers", " and ".join(f"`{n}`" for n in names)
    )
