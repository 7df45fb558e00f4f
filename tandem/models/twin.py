"""The twin: a second module tree over the very same weights, which computes for a model.

A model is loaded, trained, saved and shared with others as the Hugging Face module that it is, and
nobody patches it or hooks into it. Its forwards in training, scoring and generation run on its
twin, which `twin_of` makes when it is first needed. A twin consists of

- a copy of every module object, with the model's own parameters and buffers: no weight exists
  twice, and a weight that an optimizer changes, or that is replaced, changes in both
  (`shared_copy`, the one file that reaches below torch's public interface, says how and why);
- attention by `ops.attention`, over packed sequences and over KV memory alike, because the copies'
  config names it;
- linear layers, norms, MLPs and rotary embeddings by `ops.dense` where a family's code is known
  (`fused`, `rope`), so that a token's numbers do not depend on the batch or on the mode.

A twin follows its model: modes and adapter switches at every forward; it is made again when the
module tree, a plain attribute or the config has changed (`config_snapshot`). A family whose
attention does not go through transformers' attention interface has a twin that cannot compute
(`supports_packing`); it runs through its own forward. `selfcheck` compares twin and model at the
start of a run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import ModelError
from tandem.models.blocks import decoder_blocks, is_split
from tandem.models.config_snapshot import Modules, steering, steers_as
from tandem.models.rope import turning_point
from tandem.models.shared_copy import Switch, plain_copy, shared_copy
from tandem.models.twin_mixers import TwinMixer
from tandem.ops.attention_context import NO_STATE, LayerShape, Packed, Recording, attending


@dataclass(slots=True)
class _Twin:
    """A twin, and the state of its model that it was made from.

    by_generate: it runs the model's own forward, and stands in for that too.
    """

    model: PreTrainedModel
    modules: Modules | None = None
    config: dict[str, Any] = field(default_factory=dict)
    gathering: Switch = field(default_factory=Switch)
    shapes: tuple[LayerShape, ...] | None = None
    why_unpacked: str = ""
    borders: tuple[int, ...] | None = None
    drops: bool | None = None
    by_generate: bool = False

    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Found out when first asked for."""
        if self.shapes is None:
            self.shapes, self.why_unpacked = _recorded(self.model)
        return self.shapes

    def rope_border(self, model: PreTrainedModel) -> int | None:
        """`rope.turning_point` of `model`, whose twin this is; found out when first asked for."""
        if self.borders is None:
            borders = [turning_point(module) for module in model.modules()]
            self.borders = tuple(border for border in borders if border is not None)
        return min(self.borders, default=None)

    def has_dropout(self, model: PreTrainedModel) -> bool:
        """Whether `model` drops numbers anywhere. Found out when first asked for: rates are among
        what is compared (`config_snapshot`)."""
        if self.drops is None:
            rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
            for owner in (model.config.get_text_config(), *model.modules()):
                rates += [
                    rate
                    for name, rate in vars(owner).items()
                    if "drop" in name and isinstance(rate, int | float) and rate is not True
                ]
            self.drops = any(rate > 0 for rate in rates)
        return self.drops


_twins: WeakKeyDictionary[PreTrainedModel, _Twin] = WeakKeyDictionary()
_stand_ins: WeakKeyDictionary[PreTrainedModel, _Twin] = WeakKeyDictionary()

_KINDS = {"full_attention", "sliding_attention"}
_KEEP_NOTHING = {"mlp", "moe"}
"""Kinds of layers in which no token sees another (Nemotron-H)."""

F = TypeVar("F", bound=Callable[..., Any])


class _Compared(threading.local):
    """Twins that calls of this thread have compared with their models (`compares_once`)."""

    def __init__(self) -> None:
        self.twins: dict[PreTrainedModel, _Twin] = {}


_compared = _Compared()


def compares_once(function: F) -> F:
    """For a function whose first argument is a model, which nobody changes while it runs: the model
    is compared with its twin when it begins, and not again by what it calls."""

    @wraps(function)
    def compared(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if model in _compared.twins:
            return function(model, *args, **kwargs)
        _compared.twins[model] = _current(model)
        try:
            return function(model, *args, **kwargs)
        finally:
            del _compared.twins[model]

    return cast(F, compared)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model's twin, made once, and made again when the model has changed.

    Its forward must run inside `attending` (`ops.attention_context`), on packed token ids (1, N)
    with their positions (1, N). Gradients reach the model's own parameters.
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
    """What each layer keeps, per token or of a sequence, in the order of the layers.

    Empty where a layer's attention does not go through transformers' attention interface, or a
    layer carries a state in a way that is not known.
    """
    return _current(model).layer_shapes()


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether some layer keeps a state of each sequence, beside keys and values or instead."""
    return any(shape.state != NO_STATE for shape in kv_shapes(model))


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the twin can compute: the family's attention goes through the interface."""
    return bool(kv_shapes(model))


def rope_border(model: PreTrainedModel) -> int | None:
    """The length past which a sequence's rotary embeddings all change (`rope`); None if they never
    do."""
    return _current(model).rope_border(model)


def decodes(model: PreTrainedModel) -> bool:
    """Whether the twin continues sequences token by token over KV memory."""
    entry = _current(model)
    return bool(entry.layer_shapes()) and entry.rope_border(model) is None


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether forwards in training draw dropout masks: some rate is above 0, of the config or of a
    module, as an adapter's."""
    return _current(model).has_dropout(model)


def why_unpacked(model: PreTrainedModel) -> str:
    """Why `supports_packing` or `decodes` is false; empty if both are true."""
    border = rope_border(model)
    if border is not None and supports_packing(model):
        return (
            f"family {model.config.model_type!r} recomputes its rotary embeddings past {border} "
            "tokens (longrope)"
        )
    return _current(model).why_unpacked


@contextmanager
def without_hooks(model: PreTrainedModel) -> Iterator[None]:
    """Within: a sharded model's twin, and what is `running` it, gather no weights; they must be
    whole already."""
    gathering = _current(model).gathering
    before, gathering.on = gathering.on, False
    try:
        yield
    finally:
        gathering.on = before


def running(model: PreTrainedModel) -> PreTrainedModel:
    """What runs a model's own forward: the model. Where its weights are whole and would be split
    again by its hooks (`without_hooks`), a copy that has none. What stands in for it, if anything
    does."""
    entry = _current(model)
    if entry.by_generate:
        return entry.model
    gathers = entry.gathering.on
    return model if gathers or not is_split(model) else plain_copy(model)


@contextmanager
def standing_in(
    model: PreTrainedModel, twin: PreTrainedModel, *, by_generate: bool = False
) -> Iterator[None]:
    """Within: `twin` computes in place of the model's own twin.

    Args:
        by_generate: it runs the model's own forward, not packed, and in place of that too.
    """
    entry = _Twin(twin)
    if by_generate:
        why = f"family {model.config.model_type!r} generates by its own forward"
        entry = _Twin(twin, shapes=(), why_unpacked=why, by_generate=True)
    _stand_ins[model] = entry
    try:
        yield
    finally:
        del _stand_ins[model]


def _current(model: PreTrainedModel) -> _Twin:
    if model in _stand_ins:
        return _stand_ins[model]
    if model in _compared.twins:
        return _compared.twins[model]
    entry = _twins.get(model)
    if entry is not None and entry.modules is not None and entry.modules.update(model):
        if steers_as(model, entry.config):
            return entry
        # The tree is the same, and so is what its layers keep: no forward, which a sharded model
        # would have to run on all ranks.
        made = _make(model)
        made.shapes, made.why_unpacked = entry.shapes, entry.why_unpacked
    else:
        made = _make(model)
    _twins[model] = made
    return made


def own_forwards(model: nn.Module) -> list[str]:
    """Modules whose object has a `forward` of its own, as wrappers leave it; "" is the model.

    The twin copies it, but what it calls is the model's module. That is the same for layers without
    attention, whose parameters are shared. `selfcheck` finds where it is not.
    """
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def _make(model: PreTrainedModel) -> _Twin:
    if "" in own_forwards(model):
        raise ModelError(
            f"a {type(model).__name__} must compute by its class's forward; got an object with a "
            "forward of its own, which training and generation would not run. Put it into a "
            "subclass's layers, or undo it (del model.forward)."
        )
    gathering = Switch()
    copies = shared_copy(model, gathering=gathering)
    twin = copies[model]
    assert isinstance(twin, PreTrainedModel)
    return _Twin(twin, Modules(copies), steering(model), gathering)


@torch.no_grad()
def _recorded(twin: PreTrainedModel) -> tuple[tuple[LayerShape, ...], str]:
    """Run the twin on three tokens and see which layers ask for attention, and why some do not."""
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
        others = set(getattr(twin.config.get_text_config(), "layer_types", None) or ()) - _KINDS
        if others:  # that says more than how their code failed
            reason = f"layers of {min(others)}"
        return (), f"family {family!r} does not run on packed tokens ({reason})"
    finally:
        handle.remove()
        for module, training in was_training:
            module.training = training
    text = twin.config.get_text_config()
    layers = text.num_hidden_layers
    if recording.why_not:
        return (), f"family {family!r} {recording.why_not[0]}"
    known = recording.shapes.keys() | recording.states.keys()
    kinds = getattr(text, "layer_types", None) or ()
    known |= {i for i, kind in enumerate(kinds) if kind in _KEEP_NOTHING}
    if sorted(known) != list(range(layers)):
        return (), (
            f"{len(known)} of {layers} layers of family {family!r} attend through transformers' "
            "attention interface"
        )
    if kind := _hidden_kind(text, recording):
        return (), f"family {family!r} has layers of {kind}, known to its own masks alone"
    if _runs_on(twin):
        return (), f"family {family!r} has convolutions over tokens"
    # Not the type of the weights: shards are cast when they are gathered.
    if hidden.dtype != begins[0]:
        return (), (
            f"family {family!r} computes in {_name(hidden.dtype)} and begins with embeddings in "
            f"{_name(begins[0])}"
        )
    return tuple(
        replace(recording.shapes.get(i, LayerShape()), state=recording.states.get(i, NO_STATE))
        for i in range(layers)
    ), ""


def _runs_on(twin: PreTrainedModel) -> bool:
    """Whether a convolution would run on into the next sequence: beside attention, say."""
    inside = [
        module
        for block in decoder_blocks(twin)  # audio parts beside them have convolutions of their own
        for module in block.modules()
    ]
    ours = {
        id(part) for mixer in inside if isinstance(mixer, TwinMixer) for part in mixer.modules()
    }
    return any(isinstance(module, nn.Conv1d) and id(module) not in ours for module in inside)


def _hidden_kind(config: Any, recording: Recording) -> str:
    """A kind of attention that a layer has by its config, but did not ask for; empty if none.

    Chunks and windows that are in a mask alone, which the packed forward lacks, would show in
    sequences longer than those of any check.
    """
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:  # all layers are alike
        positions = getattr(config, "max_position_embeddings", None)
        shown = any(recording.windows.values()) or not width or width >= (positions or math.inf)
        return "" if shown else "sliding_attention"
    windows = {"full_attention": False, "attention": False, "sliding_attention": bool(width)}
    for layer, kind in enumerate(kinds):
        looks_back = recording.windows.get(layer, 0) > 0
        if layer in recording.states or kind in _KEEP_NOTHING:
            is_shown = not looks_back  # attention beside a state sees all keys
        else:
            is_shown = windows.get(kind) == looks_back
        if not is_shown:
            return str(kind)
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def base_forward(twin: PreTrainedModel, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states (1, N, D) of a twin, inside `attending`."""
    output = twin.base_model(input_ids=token_ids, position_ids=positions, use_cache=False)
    return output.last_hidden_state
