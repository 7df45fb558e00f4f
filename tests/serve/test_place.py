"""Where a model that answers is put, and that it computes there what training computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MixtralConfig

from tandem.config.lora import LoraConfig
from tandem.devices import DTYPES
from tandem.engine.forward import response_logprobs
from tandem.errors import ConfigError, ModelError
from tandem.models.adapter import save_adapter
from tandem.models.frozen import freeze_quantized
from tandem.models.load import load_causal_lm, load_tokenizer, new_causal_lm
from tandem.models.lora import add_lora, is_adapted, lora_parameters
from tandem.models.quantized import PackedWeight
from tandem.models.save import save_model
from tandem.ops import native
from tandem.parallel.masters import cast_weights
from tandem.serve.judging import sequence_logprobs
from tandem.serve.loading import LoadSettings, load_policy, weight_bytes
from tandem.serve.place import Place, put
from tandem.serve.serve_command import check_place, place_flags
from tandem.serve.server import describe
from tandem.serve.sources import offer_of
from tandem.types import Source, TokenBatch, TokenRow
from tests.serve.serving import serving
from tests.tiny import save_tiny_model

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folders of one model, saved in each type."""
    first = save_tiny_model(tmp_path_factory.mktemp("model"))

    def folder(dtype: str) -> str:
        place = tmp_path_factory.mktemp(dtype)
        model = load_causal_lm(first)
        save_model(model, load_tokenizer(first), place, dtype=DTYPES[dtype])
        return str(place)

    return folder


@needs_native
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_on_a_cpu_a_models_type_follows_its_files(
    saved: Callable[[str], str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(dtype)
    auto = Place.of("cpu", "auto")
    assert auto.dtype_of(folder) == DTYPES["bf16" if dtype == "bf16" else "fp32"]
    for asked in DTYPES:
        assert Place.of("cpu", asked).dtype_of(folder) == DTYPES[asked]
    monkeypatch.setattr(native, "available", lambda: False)
    assert auto.dtype_of(folder) == torch.float32


@needs_native
def test_an_adapter_computes_in_its_bases_type(saved: Callable[[str], str], tmp_path: Path) -> None:
    base = saved("bf16")
    model = load_causal_lm(base)
    add_lora(model, LoraConfig(rank=2), seed=0)
    save_adapter(model, tmp_path / "adapter", base)
    assert Place(CPU, None).dtype_of(tmp_path / "adapter") == torch.bfloat16
    loaded = load_policy(
        offer_of(str(tmp_path / "adapter")).models["adapter"], LoadSettings(Place(CPU, None))
    )
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_answers_computes_what_training_does(saved: Callable[[str], str], dtype: str) -> None:
    """By the twins of both; and by their own forwards what Hugging Face's does, so that rotary
    frequencies are float32 too."""
    folder, kind = saved("fp32"), DTYPES[dtype]
    ids = torch.arange(3, 60)
    row = TokenRow(tuple(ids.tolist()), (False,) * 20 + (True,) * 37, Source("x", "x", 1))
    trained, moved = load_causal_lm(folder), load_causal_lm(folder)
    cast_weights(trained, kind)
    put(moved, CPU, kind)
    served = load_policy(offer_of(folder).models[Path(folder).name], LoadSettings(Place(CPU, kind)))
    assert not any(m.training for m in served.model.modules())
    assert not any(p.requires_grad for p in served.model.parameters())
    with torch.no_grad():
        learned = response_logprobs(trained, TokenBatch.from_rows([row], 0))[0][0, 20:]
        assert [token.logprob for token in sequence_logprobs(served, [row], 0)[0]] == [
            pytest.approx(float(number), abs=1e-6) for number in learned
        ]
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)(ids[None]).logits
        for model in (trained, moved):
            assert torch.equal(model(ids[None], use_cache=False).logits, want)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_are_quantized_as_training_quantizes_them(
    saved: Callable[[str], str], kind: str
) -> None:
    folder = saved("bf16")
    source = offer_of(folder).models[Path(folder).name]
    settings = LoadSettings(Place.of("cpu", "auto", kind))
    served = load_policy(source, settings)
    trained = load_causal_lm(folder, dtype=settings.dtype_of(source)).requires_grad_(False)
    quantized = freeze_quantized(trained, kind)
    row = TokenRow(tuple(range(3, 60)), (False,) * 20 + (True,) * 37, Source("x", "x", 1))
    with torch.no_grad():
        learned = response_logprobs(trained, TokenBatch.from_rows([row], 0))[0][0, 20:]
    assert [token.logprob for token in sequence_logprobs(served, [row], 0)[0]] == [
        pytest.approx(float(number), abs=1e-6) for number in learned
    ]
    kept = [m for m in served.model.modules() if isinstance(m, PackedWeight)]
    assert len(kept) == len(quantized)
    size = sum(p.nbytes for p in served.model.parameters())
    assert weight_bytes(source, settings, quantizes=True) == (size, settings.dtype_of(source))
    plain = weight_bytes(source, settings, quantizes=False)
    assert plain is not None
    assert plain[0] > size


def test_merged_weights_are_not_quantized_but_the_base_below_their_adapter(
    saved: Callable[[str], str], tmp_path: Path
) -> None:
    base = saved("fp32")
    trained = load_causal_lm(base)
    add_lora(trained, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        for parameter in lora_parameters(trained):
            parameter += 0.02 * torch.randn(parameter.shape)
    save_model(trained, load_tokenizer(base), tmp_path / "merged")
    freeze_quantized(trained.requires_grad_(False), "nf4")
    source = offer_of(str(tmp_path / "merged")).models["merged"]
    row = TokenRow(tuple(range(3, 60)), (False,) * 20 + (True,) * 37, Source("x", "x", 1))
    with torch.no_grad():
        learned = response_logprobs(trained, TokenBatch.from_rows([row], 0))[0][0, 20:]
    served = load_policy(source, LoadSettings(Place(CPU, torch.float32, "nf4")))
    assert [token.logprob for token in sequence_logprobs(served, [row], 0)[0]] == [
        pytest.approx(float(number), abs=1e-6) for number in learned
    ]
    shutil.rmtree(Path(base))
    with pytest.raises(ModelError, match="--weights load instead of merged weights"):
        load_policy(source, LoadSettings(Place(CPU, torch.float32, "nf4")))
    assert not is_adapted(load_policy(source, LoadSettings(Place(CPU, torch.float32))).model)


def test_stacked_experts_are_announced_as_they_stay(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = new_causal_lm(config, seed=0).requires_grad_(False)
    model.save_pretrained(tmp_path / "m")
    source = offer_of(str(tmp_path / "m")).models["m"]
    settings = LoadSettings(Place(CPU, torch.float32, "nf4"))
    told = weight_bytes(source, settings, quantizes=True)
    assert told is not None
    freeze_quantized(model, "nf4")
    kept = sum(parameter.nbytes for parameter in model.parameters())
    # Small matrices that are no linear layers, a router's, are told as if they were.
    assert told[0] == pytest.approx(kept, rel=0.03)


def test_a_server_says_in_how_many_bits_it_keeps_a_model(served_run: Path) -> None:
    with serving(served_run, weights="nf4") as client:
        service = client.service  # type: ignore[attr-defined]
        assert "as float32 and nf4" in "\n".join(describe(service))
        made = client.post("/v1/completions", json={"model": "sft", "prompt": "a", "max_tokens": 3})
        assert made.status_code == 200


def test_the_device_never_holds_weights_in_two_types(saved: Callable[[str], str]) -> None:
    made: list[Tensor] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.is_meta:
                made.append(out)
            return out

    model = load_causal_lm(saved("fp32"))
    weights = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() for b in model.buffers())
    with Copies():
        put(model, torch.device("meta"), torch.bfloat16)
    sizes = {kind: sum(t.numel() for t in made if t.dtype == kind) for kind in DTYPES.values()}
    assert sizes[torch.bfloat16] >= weights  # the meta device unties the head
    assert (sizes[torch.float32], sizes[torch.float16]) == (buffers, 0)


@pytest.mark.parametrize(
    ("trains", "asked", "served"),
    [("auto", "auto", "fp32"), ("bf16", "auto", "bf16"), ("bf16", "fp32", "fp32")],
)
def test_a_run_is_served_in_the_type_that_it_trains_in(
    served_run: Path, tmp_path: Path, trains: str, asked: str, served: str
) -> None:
    run = Path(shutil.copytree(served_run, tmp_path / "run"))
    config = run / "config.yaml"
    values = yaml.safe_load(config.read_text()) | {"dtype": trains}
    config.write_text(yaml.safe_dump(values))
    with serving(run, dtype=asked) as client:
        settings = client.service.load_settings  # type: ignore[attr-defined]
        assert settings.dtype_of(offer_of(str(run)).models["sft"]) == DTYPES[served]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        assert Place.of("auto", "auto").device.type == "cuda"
        return
    assert Place.of("auto", "auto") == Place(CPU, None)
    with pytest.raises(ModelError, match="--device must be available; got cuda, but no GPU"):
        Place.of("cuda", "auto")


def test_the_flags_take_known_names() -> None:
    from tandem.config.pages import Parser

    parser = Parser("chat", "[flags]", "About.", "tandem chat")
    place_flags(parser, "something.")
    check_place(parser.parse_args([]))
    for flags in (["--device", "gpu"], ["--dtype", "int4"]):
        with pytest.raises(ConfigError, match=f"{flags[0]} must be one of auto, .*; got"):
            check_place(parser.parse_args(flags))
    with pytest.raises(ConfigError, match="--weights must be one of int8, nf4; got 'int4'"):
        check_place(parser.parse_args(["--weights", "int4"]))


def test_the_type_of_a_broken_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such family"}))
    with pytest.raises(ModelError, match=r"must have a config\.json that transformers reads"):
        Place(CPU, None).dtype_of(tmp_path)
