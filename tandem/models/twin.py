"""The generation twin: a second module tree over the very same weights.

A model is trained, saved and read as the Hugging Face module that it is. What computes is its
twin: copies of its module objects whose parameter and buffer tables are the originals' own, so
that no weight exists twice and none can differ. In the twin, attention goes to
`ops.attention.tandem_attention` and plain layers to the operations of `ops.dense`, packed
sequences and KV memory included; hooks and flags of the original stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.models.config_snapshot import Attributes, Settings
from tandem.models.fused import fuse
from tandem.models.rope import turning_point
from tandem.models.shared_copy import Switch, copied, drop_hooks
from tandem.models.shared_copy import copied_tree as copied_tree
from tandem.models.shared_copy import plain_copy as plain_copy
from tandem.ops.attention_context import LayerShape, Packed, Recording, attending


@dataclass(slots=True)
class _Twin:
    """A twin, and by module, in the order of `modules()`: original, its attributes, copy."""

    model: PreTrainedModel
    kind: type[PreTrainedModel]
    originals: list[ReferenceType[nn.Module]]
    attributes: list[Attributes]
    copies: list[nn.Module]
    hooks: Switch
    settings: Settings | None = None
    shapes: tuple[LayerShape, ...] | None = None
    why_unpacked: str = ""


_twins: WeakKeyDictionary[PreTrainedModel, _Twin] = WeakKeyDictionary()
_stand_ins: WeakKeyDictionary[PreTrainedModel, _Twin] = WeakKeyDictionary()


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model's twin, built once and kept in step with it: with the module tree, with plain
    attributes such as dropout rates and sizes, and with the config.

    Its forward must run inside `ops.steps.attending`, on packed token ids (1, N) with their
    positions (1, N). Gradients reach the model's own parameters.
    """
    return _current(model).model


def shares_every_tensor(model: nn.Module) -> bool:
    """Whether the twin's parameters and buffers are the model's own objects, by identity."""
    assert isinstance(model, PreTrainedModel)
    twin = twin_of(model)
    ours = [*model.named_parameters(), *model.named_buffers()]
    theirs = [*twin.named_parameters(), *twin.named_buffers()]
    return len(ours) == len(theirs) and all(
        name == other and tensor is same
        for (name, tensor), (other, same) in zip(ours, theirs, strict=True)
    )


def kv_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each attention layer keeps per token, in the order of the layers.

    Empty where the model's attention does not go through transformers' attention interface.
    """
    entry = _current(model)
    if entry.shapes is None:
        entry.shapes, entry.why_unpacked = _recorded(entry.model)
    return entry.shapes


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the twin computes this family: its attention is reached through the interface."""
    return bool(kv_shapes(model))


def rope_border(model: PreTrainedModel) -> int | None:
    """Tokens past which all tokens of a sequence turn otherwise (`rope`); None where none do."""
    borders = [turning_point(module) for module in model.modules()]
    return min((border for border in borders if border is not None), default=None)


def decodes(model: PreTrainedModel) -> bool:
    """Whether the twin continues sequences token by token over KV memory."""
    return supports_packing(model) and rope_border(model) is None


def why_unpacked(model: PreTrainedModel) -> str:
    """Why `supports_packing` or `decodes` says no; empty where both say yes."""
    border = rope_border(model)
    if border is not None and supports_packing(model):
        return (
            f"family {model.config.model_type!r} recomputes its rotary embeddings past {border} "
            "tokens (longrope)"
        )
    return _current(model).why_unpacked


@contextmanager
def without_hooks(model: PreTrainedModel) -> Iterator[None]:
    """Within: the twin of a model split over ranks gathers nothing; its weights must be whole."""
    hooks = _current(model).hooks
    before, hooks.on = hooks.on, False
    try:
        yield
    finally:
        hooks.on = before


@contextmanager
def standing_in(model: PreTrainedModel, twin: PreTrainedModel) -> Iterator[None]:
    """Within: `twin` computes in place of the model's own twin."""
    _stand_ins[model] = _Twin(twin, type(model), [], [], [], Switch())
    try:
        yield
    finally:
        del _stand_ins[model]


def _current(model: PreTrainedModel) -> _Twin:
    if model in _stand_ins:
        return _stand_ins[model]
    entry = _twins.get(model)
    if entry is None or not _follow(model, entry):
        entry = _twins[model] = _build(model)
        _follow(model, entry)
    if entry.settings is None:
        entry.settings = Settings(model)
    elif not entry.settings.hold(model):
        # The tree is the same, and so is what its layers keep: no forward, which a model that is
        # split would have to run on all ranks.
        shapes, why = entry.shapes, entry.why_unpacked
        entry = _twins[model] = _build(model)
        _follow(model, entry)
        entry.settings, entry.shapes, entry.why_unpacked = Settings(model), shapes, why
    return entry


def _follow(model: PreTrainedModel, entry: _Twin) -> bool:
    """Take over what may change on a module object; False if the tree or an attribute changed.

    Every forward comes through here: a microsecond per module.
    """
    if type(model) is not entry.kind:  # it has been split over the ranks
        return False
    originals, attributes, copies = entry.originals, entry.attributes, entry.copies
    count = 0
    for module in model.modules():
        if count == len(originals) or originals[count]() is not module:
            return False
        state, known, twin = module.__dict__, attributes[count], copies[count].__dict__
        count += 1
        try:
            if known.read(state) != known.values:
                return False
        except KeyError:
            return False
        if twin["training"] is not state["training"]:
            twin["training"] = state["training"]
        if "gradient_checkpointing" in state:
            twin["gradient_checkpointing"] = state["gradient_checkpointing"]
    return count == len(originals)


def _build(model: PreTrainedModel) -> _Twin:
    made: dict[int, nn.Module] = {}
    configs: dict[int, object] = {}
    hooks = Switch()
    root = copied(model, made, configs, hooks)
    drop_hooks(root)  # the root's are run by the one call that a forward is (parallel.shard)
    assert isinstance(root, PreTrainedModel)
    modules = list(model.modules())
    copies = [made[id(module)] for module in modules]
    for twin in copies:
        fuse(twin)
    return _Twin(
        root,
        type(model),
        [ref(module) for module in modules],
        [Attributes.of(module) for module in modules],
        copies,
        hooks,
    )


@torch.no_grad()
def _recorded(twin: PreTrainedModel) -> tuple[tuple[LayerShape, ...], str]:
    """Run the twin on three tokens and see which layers ask for attention."""
    device = twin.device
    recording = Recording(Packed.of_lengths([3], device))
    ids = torch.zeros((1, 3), dtype=torch.long, device=device)
    family = twin.config.model_type
    was_training = [(module, module.training) for module in twin.modules()]
    twin.eval()
    begins: list[torch.dtype] = []
    embeddings = twin.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda *call: begins.append(call[-1].dtype))
    try:
        with attending(recording):
            hidden = base_forward(twin, ids, torch.arange(3, device=device)[None])
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (), f"family {family!r} does not run on packed tokens ({reason})"
    finally:
        handle.remove()
        for module, training in was_training:
            module.training = training
    text = twin.config.get_text_config()
    layers = text.num_hidden_layers
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        # Told in the mask alone, which a packed forward has none of.
        return (), f"family {family!r} attends in chunks of {text.attention_chunk_size} tokens"
    if sorted(recording.shapes) != list(range(layers)):
        return (), (
            f"{len(recording.shapes)} of {layers} layers of family {family!r} attend through "
            "transformers' attention interface"
        )
    # The weights' own type may be another: pieces over the ranks are cast when they are gathered.
    if hidden.dtype != begins[0]:
        return (), (
            f"family {family!r} computes in {_name(hidden.dtype)} and begins with embeddings in "
            f"{_name(begins[0])}"
        )
    return tuple(recording.shapes[i] for i in range(layers)), ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def base_forward(twin: PreTrainedModel, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states (1, N, D) of a twin, inside `attending`."""
    output = twin.base_model(input_ids=token_ids, position_ids=positions, use_cache=False)
    return output.last_hidden_state
