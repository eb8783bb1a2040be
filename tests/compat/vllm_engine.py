"""One run of vLLM's engine: `python vllm_engine.py MODEL FOLDER CACHE_DTYPE`, the backend by TILEWISE_VLLM.

Prints, as JSON, the tokens of some requests with their log-probabilities, how often tilewise was called, and
how many prompt tokens came from the prefix cache.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # calls are counted in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import transformers
from vllm import LLM, SamplingParams, _custom_ops
from vllm.plugins import load_general_plugins

from tilewise.compat import vllm as compat_vllm
from tilewise.dispatch import plans

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300, "max_position_embeddings": 512,
    "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {"llama": {}, "gemma2": {"sliding_window": 24, "attn_logit_softcapping": 5.0}}


def round_to_nearest() -> None:
    """As vLLM's kernel for GPUs does; that for CPUs cuts bits off, which leaves 8-bit numbers as they are."""
    real = _custom_ops.cpu_attn_reshape_and_cache

    def rounding(key: torch.Tensor, value: torch.Tensor, *rest: object, **named: object) -> None:
        real(*(t.to(torch.float8_e4m3fn).to(t.dtype) for t in (key, value)), *rest, **named)

    _custom_ops.cpu_attn_reshape_and_cache = rounding


def main(model: str, folder: str, cache: str) -> None:
    if not Path(folder).exists():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model, **SIZES, **MODELS[model])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_general_plugins()
    if os.environ["TILEWISE_VLLM"]:  # from a source tree, which has no entry points
        compat_vllm.plugin()
    if cache == "fp8":
        round_to_nearest()
    calls, real = [], plans.attend
    plans.attend = lambda *a, **k: calls.append(1) or real(*a, **k)
    engine = LLM(
        folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256,
        max_num_seqs=4, max_num_batched_tokens=48, block_size=32, disable_log_stats=True,
        kv_cache_dtype=cache,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    system = torch.randint(3, 300, (70,), generator=draw).tolist()  # a prefix of several blocks

    def prompt(length: int, prefix: list[int]) -> dict[str, list[int]]:
        return {"prompt_token_ids": prefix + torch.randint(3, 300, (length,), generator=draw).tolist()}

    first = [prompt(5, []), prompt(100, []), prompt(40, system)]
    second = [prompt(9, system), prompt(33, system), prompt(1, []), prompt(64, []), prompt(7, [])]
    options = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    done = engine.generate(first, options) + engine.generate(second, options)
    answers = [request.outputs[0] for request in done]
    print(
        json.dumps(
            {
                "tokens": [list(a.token_ids) for a in answers],
                "logprobs": [[next(iter(p.values())).logprob for p in a.logprobs] for a in answers],
                "calls": len(calls),
                "cached": sum(request.num_cached_tokens for request in done),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
