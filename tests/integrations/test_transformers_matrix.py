"""Many architectures of transformers, tiny and random: with tilewise what they give with torch's SDPA.

`calls` counts what each implementation is asked, so no architecture passes by falling back to its own code.
Those that ask no implementation are listed in `OWN_CODE` and `OWN_CLASSES`; tests hold the lists to that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from tilewise.faces.transformers import register

transformers = pytest.importorskip("transformers")

TOLERANCE = 5e-5  # of float32, relative to the largest: two orders of the same sums, through two layers
SIZES = {  # under all the names that configurations have for them
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "moe_intermediate_size"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 3),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "experts_implementation": "eager",
    "vocab_size": 40, "initializer_range": 0.3, "rotary_dim": 4, "sliding_window": 6,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 39, "decoder_start_token_id": 1,
}  # fmt: skip
DECODERS = (
    "afmoe", "apertus", "arcee", "aria_text", "bart", "bert", "bert-generation", "biogpt", "bitnet",
    "blenderbot", "blenderbot-small", "camembert", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm",
    "data2vec-text", "diffllama", "doge", "electra", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "laguna", "lfm2",
    "llama", "llama4_text", "marian", "mbart", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "pegasus", "persimmon", "phi", "phi3", "phimoe", "plbart", "qwen2",
    "qwen2_moe", "qwen3",
)  # fmt: skip
GENERATE = (
    "llama", "mistral", "gemma3_text", "qwen3", "phi3", "cohere2", "gpt_neox", "olmo3", "granite",
)  # fmt: skip
ENCODERS = (
    "albert", "bart", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "esm",
    "eurobert", "jina_embeddings_v3", "mbart", "modernbert", "nomic_bert", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
ENCODER_DECODERS = (
    "bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "pegasus", "plbart",
    "t5",
)  # fmt: skip
IMAGE = {"image_size": 12, "patch_size": 4}
VISION = (
    "vit", "deit", "dinov2", "dinov2_with_registers", "ijepa", "siglip_vision_model", "clip_vision_model",
    "aimv2_vision_model", "beit", "chinese_clip_vision_model", "dinov3_vit", "internvl_vision",
)  # fmt: skip
SOUND = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (4, 4), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
         "hidden_dropout": 0.0, "apply_spec_augment": False}  # fmt: skip
AUDIO = (
    "wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio", "sew",
)  # fmt: skip
# No SDPA in transformers, for their masks or sinks; or SDPA that drops a softcap, or UMT5's bias. Eager is
# what they mean.
EAGER = {
    **dict.fromkeys(("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"), "causal"),
    **dict.fromkeys(("bigbird_pegasus", "gemma2"), "causal"), "layoutlm": "masked",
    **dict.fromkeys(("longt5", "nllb-moe", "pegasus_x", "switch_transformers", "umt5"), "seq2seq"),
}  # fmt: skip
SPARSE = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")  # each query sees the keys that an indexer chooses
INDEXER = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
           "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
           "index_topk": 3, "index_n_heads": 2, "index_head_dim": 16, "eos_token_id": None}  # fmt: skip
OWN_CODE = {  # their layers multiply queries and keys themselves
    "big_bird": "masked", "convbert": "masked", "deberta-v2": "masked", "ibert": "masked", "mpnet": "masked",
    "nystromformer": "masked", "rembert": "masked", "roformer": "masked", "squeezebert": "masked",
    "yoso": "masked", "deberta": "masked", "flaubert": "masked", "fnet": "masked", "mra": "masked",
    "tapas": "masked", "xlm": "masked", "bloom": "causal", "codegen": "causal", "cpmant": "causal",
    "falcon_mamba": "causal", "gpt_neox_japanese": "causal", "mamba": "causal", "megatron-bert": "causal",
    "openai-gpt": "causal",
}  # fmt: skip
# Their layers take a class from a table by the implementation's name, which has transformers' own alone:
# other names are a KeyError. The first line has SDPA in transformers, the second has not.
OWN_CLASSES = {
    "data2vec-vision", "deepseek_ocr2", "falcon", "sam", "sam_hq",
    "bark", "git", "gpt_neo", "gptj", "superglue",
}  # fmt: skip
LISTED = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.19"), reason="newer releases have other tables"
)
KINDS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "plain": "AutoModel",
}


@pytest.fixture
def calls(monkeypatch) -> dict[str, int]:
    """How often each implementation was asked."""
    register()
    transformers.utils.logging.set_verbosity_error()
    counts: dict[str, int] = {}
    interface = transformers.AttentionInterface()
    for name in ("tilewise", "sdpa"):
        function = interface[name]

        def counted(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setitem(type(interface)._global_mapping, name, counted)
    return counts


def pair(kind: str, model_type: str, **changes: Any) -> dict[str, nn.Module]:
    """The same random model with both implementations: each built with its own, as some copy their config."""
    models = {}
    for name in ("tilewise", "sdpa"):
        config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
        factory = getattr(transformers, KINDS[kind])
        models[name] = factory.from_config(config, attn_implementation=name).eval()
    models["tilewise"].load_state_dict(models["sdpa"].state_dict())
    return models


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, 39, shape)


def padding(side: str, batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, slice(0, 5) if side == "left" else slice(length - 5, length)] = 0
    return mask


def assert_same(
    models: dict[str, nn.Module], calls: dict[str, int], keep: Tensor | None, inputs: Any
) -> None:
    """Outputs and every parameter's gradient, by as many calls."""
    found = []
    for model in models.values():
        out = model(**inputs)
        out = out.logits if "logits" in out else out.last_hidden_state
        out = out if keep is None else out[keep]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        (out * weights).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((out.detach(), torch.cat(grads)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.isfinite().all()
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        assert error <= TOLERANCE, error
    assert calls["tilewise"] == calls["sdpa"] >= 2, calls


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", DECODERS)
def test_decoders(model_type, calls):
    ids, mask = tokens(2, 13), padding("left", 2, 13)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    assert_same(pair("causal", model_type, is_decoder=True), calls, mask.bool(), inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ENCODERS)
def test_encoders(model_type, calls):
    ids, mask = tokens(2, 13), padding("right", 2, 13)
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert_same(pair("masked", model_type), calls, mask.bool(), inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ENCODER_DECODERS)
def test_encoder_decoders(model_type, calls):
    inputs = {"input_ids": tokens(2, 13), "attention_mask": padding("right", 2, 13)}
    assert_same(pair("seq2seq", model_type), calls, None, inputs | {"decoder_input_ids": tokens(2, 7)})


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", VISION)
def test_vision(model_type, calls):
    assert_same(pair("plain", model_type, **IMAGE), calls, None, {"pixel_values": torch.randn(2, 3, 12, 12)})


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", AUDIO)
def test_audio(model_type, calls):
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, 200:] = 0
    inputs = {"input_values": torch.randn(2, 400), "attention_mask": mask}
    models = pair("plain", model_type, num_key_value_heads=4, **SOUND)
    assert_same(models, calls, None, inputs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", GENERATE)
def test_generation(model_type, cache, calls):
    """With left padding; where the configuration has a window, caches that slide."""
    models = pair("causal", model_type, eos_token_id=None)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    options |= {} if cache == "dynamic" else {"cache_implementation": cache}
    ids, mask = tokens(2, 9), padding("left", 2, 9)
    ours, theirs = (m.generate(ids, attention_mask=mask, **options) for m in models.values())
    assert torch.equal(ours.sequences, theirs.sequences)
    logits = [torch.stack(run.logits) for run in (ours, theirs)]
    assert (logits[0] - logits[1]).abs().max() <= TOLERANCE * logits[1].abs().max()
    assert calls["tilewise"] == calls["sdpa"] == 18


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", EAGER)
def test_those_without_sdpa_give_what_eager_gives(model_type, calls):
    kind, models = EAGER[model_type], []
    for name in ("tilewise", "eager"):
        config = transformers.AutoConfig.for_model(model_type, **SIZES)
        models.append(getattr(transformers, KINDS[kind]).from_config(config, attn_implementation=name).eval())
    models[0].load_state_dict(models[1].state_dict())
    inputs = {"input_ids": tokens(2, 13), "attention_mask": torch.ones(2, 13, dtype=torch.long)}
    inputs |= {"decoder_input_ids": tokens(2, 7)} if kind == "seq2seq" else {}
    with torch.no_grad():
        ours, theirs = (model(**inputs).logits for model in models)
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    assert calls["tilewise"] >= 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", SPARSE)
def test_sparse_attention_sees_the_chosen_keys_alone(model_type, calls):
    models = []
    for name in ("tilewise", "eager"):
        config = transformers.AutoConfig.for_model(model_type, **(SIZES | INDEXER))
        factory = transformers.AutoModelForCausalLM
        models.append(factory.from_config(config, attn_implementation=name).eval())
    models[0].load_state_dict(models[1].state_dict())
    ids, mask = tokens(2, 15), padding("left", 2, 15)
    with torch.no_grad():
        ours, theirs = (m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for m in models)
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    assert calls["tilewise"] == 2
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ours, theirs = (m.generate(ids, attention_mask=mask, **options) for m in models)
    assert torch.equal(ours, theirs)


def test_sparse_attention_by_blocks_is_refused(calls):
    config = transformers.AutoConfig.for_model("minimax_m3_vl_text", **SIZES)
    config.layer_types = ["minimax_m3_sparse"] * 2
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")
    with pytest.raises(NotImplementedError, match=r"block_indices .*attn_implementation='eager'"):
        model(tokens(2, 15))


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", OWN_CODE)
def test_those_with_code_of_their_own_are_refused_or_give_what_eager_gives(model_type, calls):
    """A bool mask, added to their scores, would do next to nothing."""
    inputs = {"input_ids": tokens(2, 13), "attention_mask": padding("left", 2, 13)}
    outputs, weights = [], None
    factory = getattr(transformers, KINDS[OWN_CODE[model_type]])
    for name in ("eager", "tilewise"):
        config = transformers.AutoConfig.for_model(model_type, **SIZES)
        try:
            model = factory.from_config(config, attn_implementation=name).eval()
            if weights:
                model.load_state_dict(weights)
            weights = model.state_dict()
            outputs.append(model(**inputs)[0][inputs["attention_mask"].bool()])
        except (NotImplementedError, ValueError) as error:
            assert name == "tilewise" and re.search(
                "attn_implementation|attention implementation", str(error)
            )
            return
    eager, ours = outputs
    assert (ours - eager).abs().max() <= TOLERANCE * eager.abs().max()
    assert not calls or model_type == "codegen"  # which asks in newer releases


@LISTED
def test_those_with_classes_by_name_are_listed():
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.stem.removeprefix("modeling_")
        for path in models.glob("*/modeling_*.py")
        if "_ATTENTION_CLASSES[" in path.read_text(encoding="utf-8")
    }
    assert found == {name.replace("-", "_") for name in OWN_CLASSES}


@LISTED
@pytest.mark.parametrize("model_type", sorted(OWN_CLASSES - {"superglue"}))  # which AutoModel does not build
def test_those_with_classes_by_name_know_no_other(model_type, calls):
    config = transformers.AutoConfig.for_model(model_type)
    with torch.device("meta"), pytest.raises(KeyError, match="tilewise"):
        transformers.AutoModel.from_config(config, attn_implementation="tilewise")
