"""Adapters in PEFT's folder format: adapter_config.json and adapter_model.safetensors.

Keys are `base_model.model.<layer>.lora_A.weight`; a classification model's head is saved whole
under `base_model.model.score.weight` (PEFT's modules_to_save). Trained rows of tokens are under
`base_model.model.<layer>.token_adapter.trainable_tokens_delta`, in the order of the config's
trainable_token_indices: values, although PEFT calls them deltas. The scores' mean and sd, and that
a head is a critic's, are in the metadata of the safetensors file, which PEFT ignores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.errors import ModelError
from tandem.models.composite import own_name
from tandem.models.hub_name import with_revision
from tandem.models.lora import (
    SCALAR_HEAD,
    adaptable,
    attach_adapters,
    lora_layers,
    scalar_head,
    train_adapters,
)
from tandem.models.source import (
    ADAPTER_CONFIG,
    Located,
    kept_layer_numbers,
    names_in,
    read_adapter_config,
)
from tandem.models.token_layers import ROWS, attach_token_rows, matrices_of, token_layers
from tandem.models.weight_files import Weight, WeightFile, Writers, plain_unit, write_files
from tandem.tensor_files import open_tensors
from tandem.text import cause_of

ADAPTER_WEIGHTS = "adapter_model.safetensors"
VALUE_HEAD = "value_head"
"""In a model's config and an adapter's metadata: its scalar head is a critic's."""
_PREFIX = "base_model.model."
_ROWS = ".token_adapter.trainable_tokens_delta"
_TOKENS = "trainable_token_indices"
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "alpha_pattern",
    "rank_pattern",
    "layer_replication",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
)


def _adapter_weights(model: PreTrainedModel) -> dict[str, Weight]:
    """The adapters' weights, trained rows and a scalar head's, under PEFT's names without the
    prefix."""
    tensors: dict[str, Tensor] = {}
    for name, layer in lora_layers(model):
        for part in ("lora_A", "lora_B"):
            tensors[f"{name}.{part}.weight"] = getattr(layer, part).weight.detach()
    for name in _layers_with_rows(model):
        rows = model.get_submodule(name).lora_tokens
        tensors[f"{name}{_ROWS}"] = rows.weight.detach()  # type: ignore[union-attr, operator]
    head = scalar_head(model)
    if head is not None:
        for name, weight in head.state_dict().items():
            tensors[f"{SCALAR_HEAD}.{name}"] = weight
    return {name: Weight.of(tensor) for name, tensor in tensors.items()}


def save_adapter(
    model: PreTrainedModel,
    folder: str | Path,
    base_path: str | Path,
    *,
    writers: Writers | None = None,
) -> None:
    """Write the adapters (and a scalar head) of a model to a folder that PEFT opens.

    Args:
        base_path: the base model's folder or hub name, written into the config; a local folder as
            an absolute path, so that the adapter loads from anywhere on this machine.
        writers: the ranks that take part; the first one writes. None: only this process.
    Raises:
        ModelError: the model has no adapters.
        OSError: this rank could not write; it has still taken part in the gathering.
    """
    if not lora_layers(model):
        raise ModelError("save_adapter must get a model with adapters; got none. Call add_lora.")
    metadata = {"format": "pt"}
    if scalar_head(model) is not None:
        for name in ("score_mean", "score_std"):
            if hasattr(model.config, name):
                metadata[name] = repr(float(getattr(model.config, name)))
        if scales := getattr(model.config, "grade_scales", None):
            metadata["grade_scales"] = json.dumps(scales)
        if getattr(model.config, VALUE_HEAD, False):
            metadata[VALUE_HEAD] = "true"
    target, writers = Path(folder), writers or Writers()
    if writers.is_first:
        (target / ADAPTER_WEIGHTS).unlink(missing_ok=True)
    there = _names_in_base(model, base_path)
    weights = {f"{_PREFIX}{there(name)}": w for name, w in _adapter_weights(model).items()}
    units = [plain_unit({name: weight}) for name, weight in weights.items()]
    write_files(target, [WeightFile(ADAPTER_WEIGHTS, units, metadata)], writers)
    if writers.is_first:
        text = json.dumps(_peft_config(model, base_path, there), indent=2, sort_keys=True)
        (target / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def load_adapter(model: PreTrainedModel, folder: str | Path) -> list[str]:
    """Put a PEFT LoRA folder's adapter on its base model, live, in place.

    Which layers are adapted is read from the weights' names, so that any form of target_modules
    works.

    Returns:
        the names of the adapted layers.
    Raises:
        ModelError: not LoRA, a variant that changes the formula, another task, damaged files, or
            weights that do not fit the model.
    """
    source = Located(str(folder))
    config = read_adapter_config(source)
    if config is None:
        raise ModelError(f"adapter folder {source.name!r} must hold {ADAPTER_CONFIG}; got none.")
    _check_config(config, source.name, classifies=scalar_head(model) is not None)
    numbers = kept_layer_numbers(model)
    tensors, metadata = _read_tensors(Path(folder) / ADAPTER_WEIGHTS, numbers)
    tokens = _tokens_of(model, config, source.name)
    names = _adapted_names(model, tensors, source.name, tokens)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    if config.get("use_rslora"):  # scaled by alpha / sqrt(rank), arXiv:2312.03732
        alpha *= math.sqrt(rank)
    attach_adapters(model, names, rank, alpha, float(config.get("lora_dropout") or 0.0))
    if tokens:
        attach_token_rows(model, tokens, with_memory=True)
        train_adapters(model)
        _put_in_order(tensors, tokens)
    mismatched = model.load_state_dict(_checked_shapes(model, tensors, source.name), strict=False)
    assert not mismatched.unexpected_keys, mismatched.unexpected_keys
    for name in ("score_mean", "score_std"):
        if name in metadata:
            setattr(model.config, name, float(metadata[name]))
    if "grade_scales" in metadata:
        model.config.grade_scales = json.loads(metadata["grade_scales"])
    if scalar_head(model) is not None:  # the adapter brings the head, so the base's is not used
        set_value_head(model, is_critics=metadata.get(VALUE_HEAD) == "true")
    return names


def set_value_head(model: PreTrainedModel, *, is_critics: bool) -> None:
    """Keep with a scalar model, in its config, whether its head is a critic's."""
    if is_critics:
        setattr(model.config, VALUE_HEAD, True)
    elif hasattr(model.config, VALUE_HEAD):
        delattr(model.config, VALUE_HEAD)


def brings_value_head(folder: str | Path) -> bool:
    """Whether the head that a scalar model's adapter brings is a critic's.

    Raises:
        ModelError: its file is damaged.
    """
    with _opened(Path(folder) / ADAPTER_WEIGHTS) as file:
        return (file.metadata() or {}).get(VALUE_HEAD) == "true"


def _peft_config(
    model: PreTrainedModel, base_path: str | Path, there: Callable[[str], str]
) -> dict[str, Any]:
    layers = lora_layers(model)
    base = Path(base_path).expanduser()
    classifies = scalar_head(model) is not None
    is_folder = base.is_dir()
    name, revision = (str(base.resolve()), "") if is_folder else with_revision(str(base_path))
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if classifies else "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": layers[0][1].rank,
        "lora_alpha": layers[0][1].alpha,
        "lora_dropout": layers[0][1].lora_dropout.p,
        "target_modules": _target_modules(model, [name for name, _ in layers], there),
        "modules_to_save": [SCALAR_HEAD] if classifies else None,
        _TOKENS: {
            there(name): model.get_submodule(name).lora_tokens.token_ids.tolist()  # type: ignore[union-attr, operator]
            for name in _layers_with_rows(model)
        }
        or None,
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for _, layer in layers),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def _names_in_base(model: PreTrainedModel, base_path: str | Path) -> Callable[[str], str]:
    """From a layer's name to its name in the base as transformers opens it, which may have image or
    audio parts beside the decoder (`composite`)."""
    base = Path(base_path).expanduser()
    if not (base / "config.json").is_file():
        return str
    return names_in(Located(str(base)), scalar=scalar_head(model) is not None)


def _target_modules(
    model: PreTrainedModel, names: list[str], there: Callable[[str], str]
) -> list[str]:
    """The last parts of the names if they match only these layers, else the full names."""
    if any(there(name) != name for name in names):  # other parts may have layers of such names
        return [there(name) for name in names]
    endings = sorted({name.rsplit(".", 1)[-1] for name in names})
    meant = [n for n, _ in model.named_modules() if n.rsplit(".", 1)[-1] in endings]
    return endings if set(meant) == set(names) else names


def _check_config(config: dict[str, Any], name: str, *, classifies: bool) -> None:
    """Refuse an adapter with another formula or for another task."""
    problem = None
    if config.get("peft_type") != "LORA":
        problem = f"peft_type={config.get('peft_type')!r}"
    elif not isinstance(config.get("r"), int) or "lora_alpha" not in config:
        problem = f"r={config.get('r')!r}, lora_alpha={config.get('lora_alpha')!r}"
    elif config.get("bias", "none") != "none":
        problem = f"bias={config['bias']!r}"
    elif (config.get("task_type") == "SEQ_CLS") != classifies:
        problem = f"task_type={config.get('task_type')!r} for a " + (
            "scalar model" if classifies else "language model"
        )
    for option in _UNSUPPORTED:
        if config.get(option):
            problem = f"{option}={config[option]!r}"
    if problem:
        raise ModelError(
            f"adapter {name!r} must be plain LoRA for this kind of model; got {problem}. Merge it "
            "with PEFT (merge_and_unload, save_pretrained) and give the merged folder."
        )


def _read_tensors(file: Path, numbers: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The adapter's tensors without PEFT's prefix, float32, and the file's metadata.

    Args:
        numbers: how the base's files count its layers.
    """
    with _opened(file) as opened:
        tensors = {
            own_name(key.removeprefix(_PREFIX), numbers): opened.get_tensor(key).to(torch.float32)
            for key in opened.keys()  # noqa: SIM118, it is not a mapping
        }
        return tensors, opened.metadata() or {}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An adapter's tensors and metadata, as `safe_open` gives them."""
    try:
        with open_tensors(file) as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} must be a whole safetensors file; got: {cause_of(error)}. Save the adapter "
            "again (pickled adapters are not read)."
        ) from error


def _layers_with_rows(model: PreTrainedModel) -> list[str]:
    """Names of the layers whose trained rows are written; a tied head's are the embedding's."""
    found: dict[int, str] = {}
    for name, layer in token_layers(model):
        found.setdefault(id(layer.lora_tokens), name)
    return list(found.values())


def _tokens_of(model: PreTrainedModel, config: dict[str, Any], folder: str) -> dict[str, list[int]]:
    """The tokens whose rows an adapter has, in its order, by the layers' names; a list is of the
    embedding alone. A tied head, which PEFT may name too, is left out."""
    given = config.get(_TOKENS) or {}
    if isinstance(given, dict):
        given = {own_name(name): ids for name, ids in given.items()}
    matrices = matrices_of(model)
    if not isinstance(given, dict):  # a list, or what is refused below
        given = {matrices[0]: given}
    found: dict[str, list[int]] = {}
    head = model.get_output_embeddings()
    for key, ids in given.items():
        names = [n for n, m in model.named_modules() if n == key or n.endswith(f".{key}")]
        if len(names) == 1 and model.get_submodule(names[0]) is head:
            names = [n for n in matrices if model.get_submodule(n).weight is head.weight]
        whole = isinstance(ids, list) and all(type(i) is int for i in ids)
        if len(names) != 1 or names[0] not in matrices or not whole or len(set(ids)) < len(ids):
            raise ModelError(
                f"adapter {folder!r} must train rows of {' or '.join(matrices)}, each token once; "
                f"got {_TOKENS} {ids} of {key!r}. Merge it with PEFT (merge_and_unload)."
            )
        if found.setdefault(names[0], ids) != ids:
            raise ModelError(
                f"adapter {folder!r} must train the same tokens of an embedding and the head tied "
                f"to it; got {_TOKENS} {given}. Merge it with PEFT (merge_and_unload)."
            )
    return found


def _put_in_order(tensors: dict[str, Tensor], tokens: dict[str, list[int]]) -> None:
    """Name trained rows as the model does, and order them by token; in place."""
    for name, ids in tokens.items():
        rows = tensors.pop(f"{name}{_ROWS}", None)
        if rows is not None and len(rows) == len(ids):
            rows = rows[torch.tensor(ids).argsort()]
        if rows is not None:
            tensors[f"{name}.{ROWS}.weight"] = rows


def _adapted_names(
    model: PreTrainedModel, tensors: dict[str, Tensor], folder: str, tokens: dict[str, list[int]]
) -> list[str]:
    """The layers that the weights' names refer to; every name must be known."""
    known = set(adaptable(model))
    whole = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    endings = (".lora_A.weight", ".lora_B.weight")
    names: list[str] = []
    for key in tensors:
        layer = key.removesuffix(endings[0]).removesuffix(endings[1])
        if key.removesuffix(_ROWS) in tokens and key.endswith(_ROWS):
            continue
        if key.endswith(endings) and layer in known:
            names += [layer] if layer not in names else []
        elif not (scalar_head(model) is not None and key.startswith(f"{SCALAR_HEAD}.")):
            is_whole = key in whole
            raise ModelError(
                f"adapter {folder!r} must fit the linear layers of {model.config.model_type}; got "
                f"{'the whole ' if is_whole else ''}weight {key!r}. "
                + (
                    "PEFT's modules_to_save keeps such layers: merge it with PEFT "
                    "(merge_and_unload, save_pretrained) and give the merged folder."
                    if is_whole
                    else "Load it on the base model that it was trained on."
                )
            )
    if not names:
        raise ModelError(f"adapter {folder!r} must adapt a layer; got no LoRA weights in it.")
    return names


def _checked_shapes(
    model: PreTrainedModel, tensors: dict[str, Tensor], folder: str
) -> dict[str, Tensor]:
    """The tensors, if each has its parameter's shape and no adapted layer lacks A or B."""
    state = model.state_dict()
    wanted = {n for n in state if n.endswith((".lora_A.weight", ".lora_B.weight"))}
    wanted |= {f"{name}.{ROWS}.weight" for name in _layers_with_rows(model)}
    wanted |= {n for n in state if n.startswith(f"{SCALAR_HEAD}.") and scalar_head(model)}
    for key in sorted(wanted | set(tensors)):
        found = tuple(tensors[key].shape) if key in tensors else None
        if found != tuple(state[key].shape):
            raise ModelError(
                f"adapter {folder!r} must hold {key!r} with shape {tuple(state[key].shape)}; got "
                f"{found}. Load it on the base model that it was trained on."
            )
    return tensors
