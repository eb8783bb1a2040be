"""Continuous batching over a paged cache: sequences join and leave while others generate.

    python examples/generate.py                      # the demo's byte-level GPT, on the CPU, in float32
    python examples/generate.py --model llama        # a random model of Llama-3-8B's shape, on a GPU
    python examples/generate.py --model llama --dtype float32 --compare   # and transformers with SDPA

A step feeds the prompts of sequences that have joined, packed in one row, then one token of each other
sequence: on a GPU that is a CUDA graph. Each layer has its `PagedKVCache`; all share one table of pages, so
`reserve` is called once for all layers. Afterwards every token is checked against one pass without a cache.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise
from tilewise.cache.pages import PADDING, PagedBatch
from tilewise.lab.demo.gpt import GPT, NUM_BYTES
from tilewise.lab.demo.scale import CPU, Scale
from tilewise.rotary import apply_rotary, rotary_tables

# (layer, query, key, value) of packed tokens (total, heads, head_dim) -> (total, heads, head_dim)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    rotary_base: float = 500_000.0

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


LLAMA_3_8B = Shape(32, 4096, 32, 8, 14336, 128_256)
TINY = Shape(2, 64, 8, 2, 96, 100)


class Llama(nn.Module):
    """A decoder of Llama's kind with random weights; tokens of all sequences are packed in one row."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, attend: Attend, positions: Tensor) -> Tensor:
        """Hidden states (total, width); the attention turns query and key itself if it has a cache."""
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, functools.partial(attend, layer))
        return self.norm(x)


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads, shape.kv_heads, shape.kv_heads
        width, head_dim = shape.width, shape.head_dim
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (sum(self.heads), -1))
        x = x + self.out(attend(*qkv.split(self.heads, -2)).flatten(-2))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class ByteGPT(nn.Module):
    """The demo's GPT on packed tokens. It turns query and key itself."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.gpt = GPT(scale)
        self.logits = self.gpt.logits
        self.shape = Shape(
            scale.layers, scale.width, scale.heads, scale.heads, 4 * scale.width, NUM_BYTES, 1e4
        )

    def forward(self, tokens: Tensor, attend: Attend, positions: Tensor) -> Tensor:
        x = self.gpt.embedding(tokens)[None]
        turn = torch.zeros(2, 1, 1, self.shape.head_dim // 2, device=x.device)
        turn[0] = 1.0  # no turn here: `attend` does it for both models
        for layer, block in enumerate(self.gpt.blocks):

            def attend_row(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                return attend(layer, q[0], k[0], v[0])[None]

            x = block(x, attend_row, turn)
        return self.gpt.norm(x)[0]


Model = Llama | ByteGPT


@dataclass
class Request:
    """A prompt, how many tokens to generate, and those generated so far."""

    prompt: list[int]
    wanted: int
    generated: list[int] = field(default_factory=list)
    sequence: int = -1
    fed: int = 0  # tokens of the prompt that are in the cache

    @property
    def is_prompt_fed(self) -> bool:
        return self.fed >= len(self.prompt)


class Engine:
    """Runs requests in `most` rows, as pages allow: a row is free again when its sequence has ended.

    On a GPU a decoding step is one CUDA graph for all rows; a row without a sequence is padding.
    """

    def __init__(
        self, model: Model, num_pages: int, page_size: int, most: int, longest: int, chunk: int = 4096,
        backend: str | None = None,
    ) -> None:  # fmt: skip
        self.model, self.chunk, self.backend = model, chunk, backend
        shape, weight = model.shape, model.logits.weight
        self.caches: list[tilewise.PagedKVCache] = []
        for _ in range(shape.layers):
            self.caches.append(
                tilewise.PagedKVCache(
                    num_pages, page_size, shape.kv_heads, shape.head_dim, max_seqlen=longest,
                    dtype=weight.dtype, device=weight.device, shares=self.caches[0] if self.caches else None,
                )
            )  # fmt: skip
        tables = rotary_tables(torch.arange(longest), shape.head_dim, shape.rotary_base)
        self.cos, self.sin = (t.to(weight.device) for t in tables)
        self.rows: list[Request | None] = [None] * most
        self.graph = DecodingGraph(self, most) if weight.is_cuda else None

    @torch.no_grad()
    def run(self, requests: Sequence[Request]) -> int:
        """Generate for all requests; the number of steps."""
        waiting, steps = deque(requests), 0
        while waiting or any(self.rows):
            self._join(waiting)
            steps += 1
            self.step()
            for row, request in enumerate(self.rows):
                if request is not None and len(request.generated) == request.wanted:
                    self.caches[0].free(request.sequence)
                    self.rows[row] = None
        return steps

    def step(self) -> None:
        """Feed prompts, up to `chunk` tokens; then the next token of every sequence whose prompt is fed."""
        fed = [r if r is not None and r.is_prompt_fed else None for r in self.rows]
        self._feed_prompts([r for r in self.rows if r is not None and not r.is_prompt_fed])
        if any(fed):
            self._decode(fed)

    def _feed_prompts(self, joining: list[Request]) -> None:
        parts, left = [], self.chunk
        for request in joining:
            parts.append(request.prompt[request.fed : request.fed + left])
            left -= len(parts[-1])
        fed = [(request, part) for request, part in zip(joining, parts) if part]
        if not fed:
            return
        batch = self.caches[0].reserve([r.sequence for r, _ in fed], [len(part) for _, part in fed])
        tokens = torch.tensor([token for _, part in fed for token in part], device=self.cos.device)
        for (request, part), token in zip(fed, self.next_tokens(tokens, batch).tolist()):
            request.fed += len(part)
            if request.is_prompt_fed:
                request.generated.append(token)

    def _decode(self, fed: list[Request | None]) -> None:
        if self.graph is None:  # no fixed sizes: padding would cost as much as a sequence
            fed = [r for r in fed if r is not None]
        sequences = [PADDING if r is None else r.sequence for r in fed]
        tokens = torch.tensor([0 if r is None else r.generated[-1] for r in fed])
        if self.graph is None:
            best = self.next_tokens(tokens, self.caches[0].reserve(sequences, 1))
        else:
            best = self.graph.replay(sequences, tokens)
        for request, token in zip(fed, best.tolist()):
            if request is not None:
                request.generated.append(token)

    def next_tokens(self, tokens: Tensor, batch: PagedBatch) -> Tensor:
        """The most likely token after each sequence's new ones."""
        hidden = self.model(tokens, functools.partial(self._attend, batch), batch.positions)
        return self.model.logits(hidden[batch.cu_seqlens[1:].long() - 1]).argmax(-1)

    def _attend(self, batch: PagedBatch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) == len(batch.sequences):  # one token each: rows of a batch, for the decoding kernel
            q, k, v = (t[:, None] for t in (q, k, v))
        out = tilewise.attention_with_cache(
            q, self.caches[layer], k, v, batch=batch, rotary_cos=self.cos, rotary_sin=self.sin,
            backend=self.backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.flatten(0, -3)

    def _join(self, waiting: deque[Request]) -> None:
        """Give free rows to those who wait, in their order."""
        for row, request in enumerate(self.rows):
            if request is None and waiting and self._has_room(waiting[0]):
                waiting[0].sequence = self.caches[0].allocate()
                self.rows[row] = waiting.popleft()
        if not any(self.rows):
            raise ValueError(f"a prompt of {len(waiting[0].prompt)} tokens does not fit the cache")

    def _has_room(self, request: Request) -> bool:
        """Whether pages suffice until all have ended: nobody is ever put back."""
        cache = self.caches[0]
        running = [r for r in self.rows if r is not None]
        promised = sum(self._pages(r) - -(-cache.length(r.sequence) // cache.page_size) for r in running)
        return promised + self._pages(request) <= cache.free_pages

    def _pages(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.wanted) // self.caches[0].page_size)


class DecodingGraph:
    """One token of every row, captured once: lengths, pages and tokens are read from fixed memory."""

    @torch.no_grad()
    def __init__(self, engine: Engine, rows: int) -> None:
        self.cache = engine.caches[0]
        self.batch = self.cache.reserve([PADDING] * rows, 1)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=engine.cos.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and allocates what is needed
            engine.next_tokens(self.tokens, self.batch)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.best = engine.next_tokens(self.tokens, self.batch)

    def replay(self, sequences: list[int], tokens: Tensor) -> Tensor:
        """The most likely next token of each row."""
        self.cache.reserve(sequences, 1, into=self.batch)
        self.tokens.copy_(tokens.pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.best


@torch.no_grad()
def uncached_tokens(model: Model, requests: Sequence[Request]) -> list[list[int]]:
    """What the model chooses after every prefix of each request's tokens, in one pass without a cache."""
    device, shape = model.logits.weight.device, model.shape
    rows = [r.prompt + r.generated[:-1] for r in requests]
    lengths = torch.tensor([0, *map(len, rows)])
    starts = lengths.cumsum(0).to(device, torch.int32)
    positions = torch.cat([torch.arange(len(row)) for row in rows]).to(device)
    longest = int(lengths.max())
    cos, sin = (t.to(device) for t in rotary_tables(torch.arange(longest), shape.head_dim, shape.rotary_base))
    cos, sin = cos[positions], sin[positions]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out = tilewise.attention_varlen(q, k, v, starts, starts, longest, longest, causal=True)
        assert isinstance(out, Tensor)
        return out

    tokens = torch.tensor([t for row in rows for t in row], device=device)
    hidden = model(tokens, attend, positions)
    best = [model.logits(part).argmax(-1) for part in hidden.split([len(row) for row in rows])]
    return [b[len(r.prompt) - 1 :].tolist() for b, r in zip(best, requests)]


def make_requests(vocabulary: int, count: int, prompt: int, new: int, seed: int = 0) -> list[Request]:
    """Prompts of different lengths that want different numbers of tokens."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    return [
        Request(
            torch.randint(vocabulary, (draw(max(1, prompt // 4), prompt),), generator=random).tolist(),
            draw(max(1, new // 2), new),
        )
        for _ in range(count)
    ]


def transformers_speed(model: Llama, requests: Sequence[Request]) -> float:
    """Tokens a second of transformers' `generate` with SDPA: one padded batch, all wait for the longest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, weight = model.shape, model.logits.weight
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        rope_theta=shape.rotary_base, attn_implementation="sdpa", dtype=weight.dtype, eos_token_id=None,
    )  # fmt: skip
    with torch.device(weight.device):
        other = LlamaForCausalLM(config).to(weight.dtype).eval()
    longest, new = max(len(r.prompt) for r in requests), max(r.wanted for r in requests)
    tokens = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for n, r in enumerate(requests):  # padded on the left
        tokens[n, longest - len(r.prompt) :] = torch.tensor(r.prompt)
        mask[n, longest - len(r.prompt) :] = 1
    tokens, mask = tokens.to(weight.device), mask.to(weight.device)
    generate = functools.partial(other.generate, tokens, attention_mask=mask, do_sample=False, pad_token_id=0)
    generate(max_new_tokens=2)
    seconds = timed(lambda: generate(max_new_tokens=new), weight.device)[1]
    return sum(r.wanted for r in requests) / seconds


def timed(run: Callable[[], object], device: torch.device) -> tuple[object, float]:
    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = wait()
    result = run()
    return result, wait() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "llama", "tiny"), default="gpt")
    parser.add_argument("--device", default=None, help="default: cuda for llama, cpu otherwise")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--prompt", type=int, default=None, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=None, help="tokens generated at most")
    parser.add_argument("--most", type=int, default=None, help="sequences at a time")
    parser.add_argument("--backend", default=None, help="default: what tilewise chooses")
    parser.add_argument("--compare", action="store_true", help="time transformers with SDPA too")
    chosen = parser.parse_args(arguments)
    is_large = chosen.model == "llama"
    if chosen.compare and chosen.model == "gpt":
        parser.error("--compare needs a Llama model")
    device = torch.device(chosen.device or ("cuda" if is_large else "cpu"))
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if is_large else "float32"))
    count, prompt, new, most = (
        default if given is None else given
        for given, default in zip(
            (chosen.requests, chosen.prompt, chosen.new, chosen.most),
            (96, 1024, 128, 64) if is_large else (8, 100, 40, 4),
        )
    )
    for name, number in {"requests": count, "prompt": prompt, "new": new, "most": most}.items():
        if number < 1:
            parser.error(f"--{name} must be at least 1, got {number}")
    torch.manual_seed(0)
    with device:
        model: Model = ByteGPT(CPU) if chosen.model == "gpt" else Llama(LLAMA_3_8B if is_large else TINY)
    model = model.to(dtype).eval()
    requests = make_requests(model.shape.vocabulary, count, prompt, new)
    page_size = 64 if is_large else 16
    longest = prompt + new
    engine = Engine(model, most * -(-longest // page_size), page_size, most, longest, backend=chosen.backend)
    engine.run(make_requests(model.shape.vocabulary, 2, prompt, 2, seed=1))  # compiles what is needed
    steps, seconds = timed(lambda: engine.run(requests), device)
    total = sum(r.wanted for r in requests)
    print(f"{count} requests, {total} tokens generated in {steps} steps: {total / seconds:.1f} tokens/s")
    pairs = [
        pair for r, own in zip(requests, uncached_tokens(model, requests)) for pair in zip(r.generated, own)
    ]
    same = sum(a == b for a, b in pairs)
    print(f"{same} of {len(pairs)} tokens are those of a pass without a cache ({dtype})")
    if dtype == torch.float32 and same < len(pairs):
        raise SystemExit("in float32 all must be")
    if chosen.compare:
        assert isinstance(model, Llama)
        print(f"transformers with SDPA: {transformers_speed(model, requests):.1f} tokens/s")


if __name__ == "__main__":
    main()
