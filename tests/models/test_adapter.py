"""Adapters in PEFT's format, with the peft package as oracle in both directions."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError
from tandem.models.adapter import load_adapter, save_adapter
from tandem.models.lora import add_lora, lora_layers, lora_parameters
from tandem.models.scalar import normalization, set_normalization

from .families import logits, scaled, tiny_model, tiny_scalar

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"  # PEFT's own call
)


def adapted(plain: PreTrainedModel, **config: object) -> PreTrainedModel:
    """A copy with adapters (and a scalar head) that are not at their start."""
    model = copy.deepcopy(plain)
    add_lora(model, LoraConfig(**{"rank": 3, "alpha": 7.0, **config}), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def edit(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(adapted(tiny_model("llama")), tmp_path, "base")
    return tmp_path


@pytest.mark.parametrize("targets", [("all-linear",), None])
def test_peft_loads_ours(family: str, targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    plain = tiny_model(family)
    names = [n for n, _ in lora_layers(adapted(plain))]
    model = adapted(plain, targets=targets or (names[0], names[-1]))
    save_adapter(model, tmp_path, "base")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    assert type(theirs).__name__ == "PeftModelForCausalLM"
    assert scaled(logits(theirs), logits(model))
    assert not scaled(logits(theirs), logits(plain), 1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_peft_loads_our_scalar_model(family: str, tmp_path: Path) -> None:
    plain = tiny_scalar(family)
    model = adapted(plain)
    set_normalization(model, 0.5, 2.0)
    save_adapter(model, tmp_path, "base")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    assert type(theirs).__name__ == "PeftModelForSequenceClassification"
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert scaled(logits(theirs), logits(model))
    ours = copy.deepcopy(plain)
    load_adapter(ours, tmp_path)
    assert torch.equal(logits(ours), logits(model))
    assert normalization(ours) == (0.5, 2.0)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_we_load_pefts(family: str, scalar: bool, use_rslora: bool, tmp_path: Path) -> None:
    plain = tiny_scalar(family) if scalar else tiny_model(family)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=5,
        target_modules="all-linear",
        use_rslora=use_rslora,
        init_lora_weights=False,
        fan_in_fan_out=family == "gpt2",
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
    )
    theirs = peft.get_peft_model(copy.deepcopy(plain), config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "score" in name:
                parameter += 0.1
    theirs.save_pretrained(tmp_path)
    ours = copy.deepcopy(plain)
    names = load_adapter(ours, tmp_path)
    assert names == [name for name, _ in lora_layers(ours)] or set(names) == {
        name for name, _ in lora_layers(ours)
    }
    assert scaled(logits(ours), logits(theirs))
    assert not scaled(logits(ours), logits(plain), 1e-3)


def test_a_saved_adapter_loads_as_it_was(folder: Path) -> None:
    model = adapted(tiny_model("llama"))
    save_adapter(model, folder, "base")
    ours = tiny_model("llama")
    load_adapter(ours, folder)
    assert torch.equal(logits(ours), logits(model))
    assert all(p.requires_grad for p in lora_parameters(ours))
    assert not ours.lm_head.weight.requires_grad


def test_a_local_base_is_written_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    save_adapter(adapted(tiny_model("llama")), tmp_path, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((tmp_path / "base").resolve())


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="save_adapter must get a model with adapters"):
        save_adapter(tiny_model("llama"), tmp_path, "base")


def test_no_adapter_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must hold adapter_config.json; got none"):
        load_adapter(tiny_model("llama"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"r": None}, "r=None"),
        ({"bias": "all"}, "bias='all'"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS' for a language model"),
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern="),
    ],
)
def test_adapters_that_are_no_plain_lora(
    changes: dict[str, object], found: str, folder: Path
) -> None:
    edit(folder, **changes)
    with pytest.raises(ModelError, match=f"must be plain LoRA for this kind of model; got {found}"):
        load_adapter(tiny_model("llama"), folder)


def test_a_language_models_adapter_on_a_scalar_model(folder: Path) -> None:
    with pytest.raises(ModelError, match="task_type='CAUSAL_LM' for a scalar model"):
        load_adapter(tiny_scalar("llama"), folder)


def test_damaged_weights(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="must be a whole safetensors file"):
        load_adapter(tiny_model("llama"), folder)
    file.unlink()
    with pytest.raises(ModelError, match="must be a whole safetensors file"):
        load_adapter(tiny_model("llama"), folder)


def test_another_models_adapter(folder: Path) -> None:
    with pytest.raises(ModelError, match="must fit the linear layers of gpt2; got weight 'model"):
        load_adapter(tiny_model("gpt2"), folder)
    with pytest.raises(ModelError, match=r"with shape \(40, 3\); got \(32, 3\)"):
        load_adapter(tiny_model("llama", hidden_size=40), folder)


def test_half_an_adapter(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    del weights["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"up_proj.lora_B.weight' with shape \(48, 3\); got None"):
        load_adapter(tiny_model("llama"), folder)
    save_file({}, file)
    with pytest.raises(ModelError, match="must adapt a layer; got no LoRA weights"):
        load_adapter(tiny_model("llama"), folder)
