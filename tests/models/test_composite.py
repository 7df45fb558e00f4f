"""The text decoder of checkpoints with image parts: loaded, saved, adapted, put back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from tandem.config.schema import RunConfig
from tandem.errors import ModelError
from tandem.models import text_families
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.meta_init import empty_causal_lm, empty_scalar_model
from tandem.models.scalar import load_scalar_model
from tandem.training.checks.preflight import decoders_alone

from .families import LLAMA, TOKEN_IDS, config_of, perturbed, saved, tiny_model, tokenizer
from .peft_on_whole import assert_peft_agrees

_TEXT = TOKEN_IDS | LLAMA
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_GEMMA = _TEXT | {"tie_word_embeddings": True, "sliding_window": 4}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **_GEMMA},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "mm_tokens_per_image": 4,
        "image_token_index": 98,
    },
    "gemma4": {
        "text_config": {
            "model_type": "gemma4_text",
            **_GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 99,
            "global_head_dim": 16,
        },
        "vision_config": {"model_type": "gemma4_vision", **_VISION, "head_dim": 8},
        "audio_config": None,
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
    },
    "mistral3": {  # by default its head is tied, but the files have one
        "text_config": {"model_type": "ministral3", **_TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION},
        "image_token_index": 98,
        "tie_word_embeddings": False,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": _VISION,
        "image_token_id": 98,
    },
}


def whole_model(family: str, folder: Path) -> PreTrainedModel:
    """A checkpoint with random weights, as transformers writes it; buffers are not the default."""
    torch.manual_seed(0)
    config = config_of(family, **WHOLE[family])
    model = perturbed(AutoModelForImageTextToText.from_config(config)).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer += 0.3
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


IDS = torch.arange(4, 15)[None]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


@pytest.mark.parametrize("family", WHOLE)
def test_the_decoder_is_loaded_and_saved_alone(family: str, tmp_path: Path) -> None:
    whole = whole_model(family, tmp_path / "whole")
    model = load_causal_lm(tmp_path / "whole")
    assert torch.equal(logits(model), logits(whole))
    streamed = empty_causal_lm(tmp_path / "whole")
    assert streamed is not None
    streamed.model.to_empty(device="cpu")
    streamed.fill(lambda parameter: (parameter, 0))
    for name, weight in model.named_parameters():
        assert torch.equal(streamed.model.get_parameter(name), weight), name
    for name, buffer in streamed.model.named_buffers():
        assert not name.endswith("layer_scalar") or torch.equal(buffer, model.get_buffer(name))

    again = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path / "text")).eval()
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(whole))
    assert (
        load_scalar_model(tmp_path / "whole", seed=1).config.model_type == again.config.model_type
    )
    scalar = empty_scalar_model(tmp_path / "whole")
    assert scalar is not None
    assert scalar.missing == ["score.weight"]


def test_a_head_that_differs_in_a_few_rows_is_kept(tmp_path: Path) -> None:
    whole_model("gemma3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (embedding,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    head = weights[embedding].clone()
    head[80:83] += 1.0
    name = embedding.replace("model.embed_tokens", "lm_head")
    save_file(weights | {name: head}, tmp_path / "model.safetensors", {"format": "pt"})
    streamed = empty_causal_lm(tmp_path)
    assert streamed is not None
    streamed.model.to_empty(device="cpu")
    streamed.fill(lambda parameter: (parameter, 0))
    for model in (streamed.model, load_causal_lm(tmp_path)):
        assert torch.equal(model.lm_head.weight, head)


def test_a_decoder_under_its_name_beside_parts_that_are_gone(tmp_path: Path) -> None:
    whole = whole_model("gemma3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name.startswith("language_model.")}
    assert 0 < len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    assert empty_causal_lm(tmp_path) is not None
    assert torch.equal(logits(load_causal_lm(tmp_path)), logits(whole))


@pytest.mark.parametrize(
    ("text_config", "found"),
    [
        (
            {"hidden_size": 48},
            "must have the sizes that config.json says; got model.* instead of",
        ),
        ("gemma3_text", "text_config of .* must be an object of a config's settings; got str"),
    ],
)
def test_a_wrong_text_config_is_a_line(tmp_path: Path, text_config: Any, found: str) -> None:
    whole_model("gemma3", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    is_sizes = isinstance(text_config, dict)
    config["text_config"] = config["text_config"] | text_config if is_sizes else text_config
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=found):
        load_causal_lm(tmp_path)
    if not is_sizes:
        with pytest.raises(ModelError, match=found):
            load_tokenizer(tmp_path)


def test_weights_go_back_beside_the_other_parts_as_the_docs_say(tmp_path: Path) -> None:
    whole_model("gemma3", tmp_path / "whole")
    text = load_causal_lm(tmp_path / "whole")
    perturbed(text)
    saved(text, tmp_path / "text")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", dtype="auto")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype="auto")
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    assert torch.equal(logits(whole), logits(text))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])  # AutoModelForCausalLM: whole, and alone
def test_peft_puts_an_adapter_on_the_whole_model(family: str, tmp_path: Path) -> None:
    whole_model(family, tmp_path / "whole")
    assert_peft_agrees(tmp_path / "whole", tmp_path / "run", AutoModelForCausalLM, logits)


def test_a_line_tells_what_is_left_out(tmp_path: Path) -> None:
    whole_model("gemma3", tmp_path / "whole")
    plain = str(saved(tiny_model("llama"), tmp_path / "plain"))
    line, *others = decoders_alone(RunConfig(), str(tmp_path / "whole"), plain)
    assert "(gemma3) the text decoder alone" in line
    assert "as a gemma3_text checkpoint" in line
    assert not others


def test_a_decoder_without_a_class_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model("kosmos-2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="with a text decoder 'kosmos_2_text_model', no causal"):
        load_causal_lm(tmp_path)
    monkeypatch.setattr(text_families, "_EQUAL", {})  # a family that is not known to equal another
    AutoConfig.for_model("mllama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="whose text decoder 'mllama_text_model' AutoModelFor"):
        load_causal_lm(tmp_path)
    text: dict[str, Any] = {"model_type": "gemma4_text", "num_kv_shared_layers": 30}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = AutoConfig.for_model("gemma4_assistant", text_config=text)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="which drafts for another model, from its states"):
        load_causal_lm(tmp_path)
