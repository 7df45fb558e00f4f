"""Decoders that exist beside image parts alone: loaded as the family that they equal for text."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from tandem.config.lora import LoraConfig
from tandem.config.schema import RunConfig
from tandem.errors import ModelError
from tandem.memory.shape import shape_of
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.meta_init import empty_causal_lm, empty_scalar_model
from tandem.models.save import save_model
from tandem.models.scalar import load_scalar_model
from tandem.models.source import saved_dtype
from tandem.predict.models import config_of as plan_config_of
from tandem.predict.models import shape_for
from tandem.training.checks.preflight import decoders_alone

from .families import TOKEN_IDS, config_of, perturbed, saved, tiny_model, tokenizer
from .peft_on_whole import assert_peft_agrees

_TEXT: dict[str, Any] = TOKEN_IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
_EXPERTS = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [1],
}
_GLM_EXPERTS = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_QWEN3_VISION = _VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_PATCHES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_AUDIO = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "output_dim": 32,
    "max_source_positions": 16,
}
_MARKS = {"vision_start_token_id": 96, "vision_end_token_id": 97}


def _rows(theta: float = 5e4, **more: Any) -> dict[str, Any]:
    """Rotary positions in three rows."""
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": [1, 1, 2], **more}


_GLM_ROWS = _rows(1e4, mrope_section=[1, 1], partial_rotary_factor=0.5)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "qwen2",
        {
            "text_config": _TEXT
            | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
            | {"rope_parameters": _rows()},
            "vision_config": {"depth": 1, "hidden_size": 32, "embed_dim": 16, "num_heads": 2},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_5_vl": (
        "qwen2",
        {"text_config": _TEXT | {"rope_parameters": _rows(**_YARN)}, "vision_config": _VISION},
    ),
    "qwen3_vl": (
        "qwen3",
        {
            "text_config": _TEXT
            | {"head_dim": 8, "rope_parameters": _rows(mrope_interleaved=True)},
            "vision_config": _QWEN3_VISION,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_moe",
        {
            "text_config": _TEXT | _EXPERTS | {"rope_parameters": _rows(mrope_interleaved=True)},
            "vision_config": _QWEN3_VISION,
        },
    ),
    "qwen2_5_omni_thinker": (
        "qwen2",
        {
            "text_config": _TEXT | {"rope_parameters": _rows()},
            "vision_config": _VISION,
            "audio_config": _AUDIO,
            **_MARKS,
        },
    ),
    "qwen3_omni_moe_thinker": (
        "qwen3_moe",
        {
            "text_config": _TEXT | _EXPERTS | {"rope_parameters": _rows(mrope_interleaved=True)},
            "vision_config": _QWEN3_VISION,
            "audio_config": _AUDIO | {"downsample_hidden_size": 16},
            **_MARKS,
        },
    ),
    "mllama": (
        "llama",
        {
            "text_config": _TEXT
            | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
            | {"rope_parameters": _LLAMA3},
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 2,
                "intermediate_size": 24,
                "vision_output_dim": 32,
                "image_size": 16,
                "patch_size": 8,
                "intermediate_layers_indices": [0],
            },
            "image_token_index": 99,
        },
    ),
    "emu3": (
        "llama",
        {
            "text_config": _TEXT,
            "vq_config": {
                "codebook_size": 8,
                "embed_dim": 4,
                "base_channels": 32,
                "channel_multiplier": [1],
                "num_res_blocks": 1,
                "hidden_size": 32,
                "attn_resolutions": [],
            },
            "vocabulary_map": {"<image>": 98},
        },
    ),
    "glm4v": ("glm4", {"text_config": _TEXT | {"rope_parameters": _GLM_ROWS}} | _MARKS),
    "glm4v_moe": (
        "glm4_moe",
        {"text_config": _TEXT | _GLM_EXPERTS | {"rope_parameters": _GLM_ROWS}} | _MARKS,
    ),
    "glm_ocr": (
        "glm4",
        {
            "text_config": _TEXT
            | {"head_dim": 16, "rope_parameters": _rows(1e4, mrope_section=[2, 3, 3])},
            **_MARKS,
        },
    ),
    "paddleocr_vl": (
        "llama",
        {
            "text_config": _TEXT | {"head_dim": 8, "rope_parameters": _rows()},
            "vision_config": _PATCHES,
            **_MARKS,
        },
    ),
    "granite_docling": (
        "granite",
        {
            "text_config": _TEXT | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
            "vision_config": _PATCHES | {"out_hidden_size": 32},
        },
    ),
}
_GLM_VISION = _VISION | {"image_size": 28, "patch_size": 14}
for _family in ("glm4v", "glm4v_moe", "glm_ocr"):
    WHOLE[_family][1]["vision_config"] = _GLM_VISION


def whole_model(family: str, folder: Path, **options: Any) -> PreTrainedModel:
    """A checkpoint with random weights, as transformers writes it."""
    torch.manual_seed(0)
    config = config_of(family, **copy.deepcopy(WHOLE[family][1]))
    model = perturbed(AutoModelForImageTextToText.from_config(config)).eval()
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return model


IDS = torch.arange(4, 90)[None, torch.randperm(86, generator=torch.Generator().manual_seed(1))]
IDS = IDS[:, :24]


def logprobs(model: Any) -> torch.Tensor:
    """(1, 23) of each token after those before it."""
    logits: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]


def decoder_of(whole: PreTrainedModel) -> torch.nn.Module:
    parts = whole.model
    names = ("language_model", "text_model")
    found = next((getattr(parts, name) for name in names if hasattr(parts, name)), parts)
    assert isinstance(found, torch.nn.Module)
    return found


def rewrite(folder: Path, change: Any) -> None:
    """Change the one file's tensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize("family", WHOLE)
def test_the_decoder_is_loaded_as_the_family_it_equals(family: str, tmp_path: Path) -> None:
    whole = whole_model(family, tmp_path / "whole")
    model = load_causal_lm(tmp_path / "whole")
    assert model.config.model_type == WHOLE[family][0]
    assert not any("mrope" in name for name in model.config.rope_parameters)
    own, theirs = logprobs(model), logprobs(whole)
    torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-6)
    own.sum().backward()
    theirs.sum().backward()
    for name in ("norm", "layers.0.self_attn.k_proj", "embed_tokens"):
        mine = model.model.get_submodule(name).weight.grad
        their = decoder_of(whole).get_submodule(name).weight.grad
        torch.testing.assert_close(mine, their[: len(mine)], rtol=1e-6, atol=1e-6)
    answers = [
        made.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)
        for made in (model, whole)
    ]
    assert torch.equal(*answers)

    again = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path / "text")).eval()
    assert type(again) is type(model)
    assert torch.equal(logprobs(again), own)
    streamed = empty_causal_lm(tmp_path / "whole")
    if not family.endswith("_moe_thinker") and family != "glm4v_moe":  # a tensor for each expert
        assert streamed is not None
        streamed.model.to_empty(device="cpu")
        streamed.fill(lambda parameter: (parameter, 0))
        for name, weight in model.named_parameters():
            assert torch.equal(streamed.model.get_parameter(name), weight), name


def _named_newly(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    new = {"visual": "model.visual", "model": "model.language_model"}
    parts = {name: name.partition(".") for name in tensors}
    return {f"{new.get(a, a)}.{b}": tensors[name] for name, (a, _, b) in parts.items()}


def test_old_and_new_names_in_one_file_or_several(tmp_path: Path) -> None:
    whole = whole_model("qwen2_5_vl", tmp_path / "old")
    assert any(name.startswith("visual.") for name in load_file(tmp_path / "old/model.safetensors"))
    whole_model("qwen2_5_vl", tmp_path / "new")
    rewrite(tmp_path / "new", _named_newly)
    whole_model("qwen2_5_vl", tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    flat = json.loads((tmp_path / "old/config.json").read_text())
    text = flat.pop("text_config")
    (tmp_path / "old/config.json").write_text(json.dumps(text | flat))  # as transformers 4 has it
    for name in ("old", "new", "shards"):
        assert torch.equal(logprobs(load_causal_lm(tmp_path / name)), logprobs(whole)), name
        assert empty_causal_lm(tmp_path / name) is not None
        assert (
            "(qwen2_5_vl) the text dec" in decoders_alone(RunConfig(), str(tmp_path / name), "")[0]
        )


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_thinker_of_an_omni_model(family: str, tmp_path: Path) -> None:
    whole = whole_model(f"{family}_thinker", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": family, "thinker_config": config, "enable_audio_output": False})
    )
    other = {"talker.codec_head.weight": torch.zeros(2, 2)}
    rewrite(tmp_path, lambda found: other | {f"thinker.{n}": w for n, w in found.items()})
    model = load_causal_lm(tmp_path)
    assert torch.equal(logprobs(model), logprobs(whole))
    assert not model.config.tie_word_embeddings
    assert f"({family})" in decoders_alone(RunConfig(), str(tmp_path), "")[0]
    assert plan_config_of(str(tmp_path))["model_type"] == model.config.model_type


def test_experts_the_other_way_round(tmp_path: Path) -> None:
    whole = whole_model("qwen3_vl_moe", tmp_path)

    def exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: weight.transpose(1, 2).contiguous() if ".experts." in name else weight
            for name, weight in tensors.items()
        }

    rewrite(tmp_path, exchanged)
    assert torch.equal(
        logprobs(AutoModelForImageTextToText.from_pretrained(tmp_path)), logprobs(whole)
    )
    streamed = empty_causal_lm(tmp_path)
    assert streamed is not None
    streamed.model.to_empty(device="cpu")
    streamed.fill(lambda parameter: (parameter, 0))
    model = load_causal_lm(tmp_path)
    assert torch.equal(logprobs(model), logprobs(whole))
    for name, weight in model.named_parameters():
        assert torch.equal(streamed.model.get_parameter(name), weight), name


@pytest.mark.parametrize("family", ["qwen2_vl", "mllama"])
def test_half_precision_and_tied_heads_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    whole = whole_model(family, tmp_path).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    if family == "qwen2_vl":  # as transformers 4 wrote it
        config = json.loads((tmp_path / "config.json").read_text())
        text = config.pop("text_config")
        text.pop("dtype", None)
        flat = text | config | {"torch_dtype": config.pop("dtype")}
        flat.pop("dtype")
        (tmp_path / "config.json").write_text(json.dumps(flat))
    streamed = empty_causal_lm(tmp_path)
    assert streamed is not None
    model = load_causal_lm(tmp_path, dtype=torch.bfloat16)
    for made in (model, streamed.model):
        assert saved_dtype(made) == torch.bfloat16
        assert made.config.tie_word_embeddings == (family == "qwen2_vl")
        is_tied = made.lm_head.weight is made.model.embed_tokens.weight
        assert is_tied == (family == "qwen2_vl")
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight)


@pytest.mark.parametrize("family", ["qwen2_vl", "mllama"])
def test_a_reward_model_from_it(family: str, tmp_path: Path) -> None:
    whole_model(family, tmp_path / "whole")
    model = load_scalar_model(tmp_path / "whole", seed=1)
    empty = empty_scalar_model(tmp_path / "whole")
    assert empty is not None
    assert empty.missing == ["score.weight"]
    again = AutoModelForSequenceClassification.from_pretrained(saved(model, tmp_path / "reward"))
    assert again.config.model_type == WHOLE[family][0]
    with torch.no_grad():
        scores = [made.eval()(input_ids=IDS).logits for made in (model, again)]
    assert torch.equal(*scores)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("family", "opener"),
    [
        ("qwen2_5_vl", AutoModelForImageTextToText),
        ("emu3", AutoModelForImageTextToText),
        ("mllama", AutoModelForCausalLM),
    ],
)
def test_peft_puts_an_adapter_on_what_transformers_opens(
    family: str, opener: Any, tmp_path: Path
) -> None:
    whole_model(family, tmp_path / "whole")
    assert_peft_agrees(tmp_path / "whole", tmp_path / "run", opener, logprobs)


def test_an_adapter_of_a_reward_model_finds_its_layers(tmp_path: Path) -> None:
    whole_model("mllama", tmp_path / "whole")
    model = load_scalar_model(tmp_path / "whole", seed=1)
    add_lora(model, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1
        save_model(model, tokenizer(), tmp_path / "run", base_path=tmp_path / "whole")
        again = load_scalar_model(tmp_path / "run" / "adapter", seed=2)
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_weights_go_back_beside_the_other_parts_as_the_docs_say(tmp_path: Path) -> None:
    for family in ("qwen2_5_vl", "mllama"):
        whole_model(family, tmp_path / family)
        text = perturbed(load_causal_lm(tmp_path / family))
        saved(text, tmp_path / "text")
        whole = AutoModelForImageTextToText.from_pretrained(tmp_path / family, dtype="auto")
        text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype="auto")
        if family == "mllama":
            decoder, rows = whole.model.language_model, text.config.vocab_size
            for_text = [layer for layer in decoder.layers if hasattr(layer, "self_attn")]
            for layer, trained in zip(for_text, text.model.layers, strict=True):
                layer.load_state_dict(trained.state_dict())
            decoder.norm.load_state_dict(text.model.norm.state_dict())
            decoder.embed_tokens.weight.data[:rows] = text.model.embed_tokens.weight.data
        else:
            whole.model.language_model.load_state_dict(text.model.state_dict())
        whole.lm_head.load_state_dict(text.lm_head.state_dict())
        assert torch.equal(logprobs(whole), logprobs(text))


def test_a_missing_layer_and_a_left_over_one_are_named(tmp_path: Path) -> None:
    for family, layer in (("qwen2_vl", "model.layers.1."), ("mllama", "model.layers.2.")):
        whole_model(family, tmp_path / family)
        gone = f"{layer}mlp.up_proj.weight"
        rewrite(
            tmp_path / family,
            lambda found, gone=gone: {
                name: weight for name, weight in found.items() if not name.endswith(gone)
            },
        )
        assert empty_causal_lm(tmp_path / family) is None
        with pytest.raises(ModelError, match=r"1 \(model.layers.1.mlp.up_proj.weight\) missing"):
            load_causal_lm(tmp_path / family)
    whole_model("qwen3_vl", tmp_path / "more")
    name = "model.language_model.layers.0.self_attn.q_proj.bias"
    rewrite(tmp_path / "more", lambda found: found | {name: torch.zeros(32)})
    with pytest.raises(ModelError, match=r"none missing and 1 \(model.layers.0.self_attn.q_proj"):
        load_causal_lm(tmp_path / "more")


def test_a_wrong_size_is_named(tmp_path: Path) -> None:
    whole_model("mllama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"got model.layers.\d.mlp.* instead of"):
        load_causal_lm(tmp_path)


def test_tokens_of_images_without_an_output_leave_the_tokenizer(tmp_path: Path) -> None:
    whole_model("mllama", tmp_path / "whole")
    more = copy.deepcopy(tokenizer())
    more.add_special_tokens({"extra_special_tokens": ["<|image|>"]})
    more.save_pretrained(tmp_path / "whole")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "whole")) == 100
    own = load_tokenizer(tmp_path / "whole")
    assert own.get_vocab() == tokenizer().get_vocab()
    assert own.encode("w1 w2") == tokenizer().encode("w1 w2")
    own.save_pretrained(tmp_path / "again")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "again")) == 99


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe", "mllama"])
def test_a_plan_counts_the_decoder_alone(family: str, tmp_path: Path) -> None:
    whole_model(family, tmp_path)
    shape = shape_for(plan_config_of(str(tmp_path)))
    assert shape == shape_of(load_causal_lm(tmp_path).config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("visual.patch.weight", "visual.patch.weight"),
        ("model.embed_tokens.weight", "must have the sizes that config.json says"),
    ],
    ids=["a stray part", "more rows"],
)
def test_a_plain_folder_is_not_read_as_an_image_models(
    change: str, said: str, tmp_path: Path
) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rows, width = tensors["model.embed_tokens.weight"].shape
    tensors[change] = torch.zeros(rows + 8, width)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        load_causal_lm(tmp_path)


def test_a_plan_does_not_ask_transformers_of_other_configs(tmp_path: Path) -> None:
    """Which may want to run code of the folder's own."""
    text = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32}
    config = {
        "model_type": "kimi_vl",
        "auto_map": {"AutoConfig": "configuration_kimi_vl.KimiVLConfig"},
        "text_config": text,
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan_config_of(str(tmp_path)) == {**text, "model_type": "llama"}
