"""Critic and reward model: Hugging Face's own sequence-classification class with one output.

Nothing is added to the class, so saving is save_pretrained and anyone's
AutoModelForSequenceClassification loads it. Families for which transformers has no such class get
one built alike (`classifiers`), which only Tandem loads. The mean and sd that normalize the scores
are attributes of its config, `score_mean` and `score_std`, and so in config.json, as are the
`grade_scales` of a model that has learned grades, and `value_head` of a critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.errors import ModelError
from tandem.models.adapter import VALUE_HEAD, brings_value_head, load_adapter
from tandem.models.build import build_model, require_decoder, set_dropout
from tandem.models.classifiers import one_output, require_classifier, take_backbone
from tandem.models.folder import read_headers
from tandem.models.load import (
    load_causal_lm,
    load_weights,
    open_decoder,
    require_safetensors,
)
from tandem.models.lora import SCALAR_HEAD, scalar_head
from tandem.models.packed import last_states, predictor_states
from tandem.models.source import (
    Located,
    classifies,
    files_of,
    keep_layer_numbers,
    read_names,
)
from tandem.models.twin import compares_once, twin_of
from tandem.types import TokenBatch


def load_scalar_model(
    path: str | Path,
    *,
    seed: int,
    from_causal_lm: bool | None = None,
    zero_head: bool = False,
    dropout: float = 0.0,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A decoder with a scalar head, float32, in eval mode.

    From a language model the backbone is taken and the head is new (normal, sd 1/sqrt(D + 1), from
    `seed`); a sequence-classification model keeps its head. A folder with a LoRA adapter for
    sequence classification loads its base and puts adapter and head on it.

    Args:
        from_causal_lm: True: start a new head in any case; False: the path must have one; None:
            as config.architectures says, or else whether the files hold a head.
        zero_head: a new head is all zeros, as for `start_new_head`.
    Raises:
        ModelError: as `load_causal_lm`; also a family without a backbone to put a head on, a
            head with more than one output, or no head although the caller needs one.
    """
    opened = open_decoder(path, scalar=True, dropout=dropout, trust_remote_code=trust_remote_code)
    base, config = opened.base, opened.config
    has_head = has_scalar_head(base, config)
    _require_fit(
        base, config, int(config.num_labels or 0) if has_head else 0, from_causal_lm is False
    )
    if has_head:
        model = load_weights(base, config, scalar=True, trust_remote_code=trust_remote_code)
    else:
        model = _on_language_model(base, dropout, trust_remote_code)
    _require_head(model)
    if from_causal_lm or not has_head:
        start_new_head(model, seed, zeros=zero_head)
    if opened.adapter is not None:
        load_adapter(model, opened.adapter)
    return model


def check_scalar_model(
    path: str | Path, *, needs_head: bool = False, trust_remote_code: bool = False
) -> None:
    """Refuse a model that `load_scalar_model` would refuse, by its config and its files' headers
    alone.

    Args:
        needs_head: refuse what cannot score answers: a language model, whose head would be random,
            and a critic.
    Raises:
        ModelError: as `load_scalar_model`.
    """
    opened = open_decoder(path, scalar=True, trust_remote_code=trust_remote_code)
    base, config = opened.base, opened.config
    require_safetensors(base)
    outputs = _outputs(base, config) if has_scalar_head(base, config) else 0
    brings_head = opened.adapter is not None and classifies(opened.adapter)
    _require_fit(base, config, outputs, needs_head and not brings_head)
    if needs_head and opened.adapter is not None and brings_head:
        _require_no_critic(opened.adapter, brings_value_head(opened.adapter))
    elif needs_head:
        _require_no_critic(base.name, has_value_head(config))


def _outputs(source: Located, config: PreTrainedConfig) -> int:
    """How many outputs a model's head has: as in its files, where config.json may not say it."""
    said = int(config.num_labels or 0)
    if source.folder is None and said == 1:
        return said
    shapes = {tensor.name: tensor.shape for tensor in read_headers(files_of(source))}
    return shapes.get(f"{SCALAR_HEAD}.weight", (said,))[0]


def _require_fit(source: Located, config: PreTrainedConfig, outputs: int, needs_head: bool) -> None:
    """Refuse a head that does not score with one number, and none where one is needed.

    Args:
        outputs: of the head; 0 of a language model.
    """
    if needs_head and not outputs:
        raise ModelError(
            f"model {source.name!r} must have a scalar head already; got "
            f"architectures={config.architectures}. Give a reward model, or start a new head."
        )
    if outputs > 1:
        raise ModelError(
            f"model {source.name!r} must score with one number; got a head with {outputs} "
            "outputs. Give a reward model, or a language model to start a new head on."
        )


def new_scalar_model(
    config: PreTrainedConfig, seed: int, *, dropout: float = 0.0
) -> PreTrainedModel:
    """A scalar model with random weights, the same for the same seed; float32, in eval mode.

    The config's outputs and dropout rates are overwritten.

    Raises:
        ModelError: the config is not a decoder's, or its family has no backbone to put a head on.
    """
    require_decoder(config, config.model_type)
    require_classifier(config, config.model_type)
    one_output(config)
    set_dropout(config, dropout)
    model = build_model(config, scalar=True, seed=seed)
    start_new_head(model, seed)
    return model


def has_scalar_head(source: Located, config: PreTrainedConfig) -> bool:
    """Whether a model is a sequence-classification model already.

    By config.architectures; if those are absent, by a head's weight in the local files.

    Raises:
        ModelError: a weights file cannot be read.
    """
    if config.architectures:
        return any(name.endswith("ForSequenceClassification") for name in config.architectures)
    tensors = read_headers(source.folder) if source.folder else []
    return any(tensor.name == f"{SCALAR_HEAD}.weight" for tensor in tensors)


@compares_once
def token_values(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Values (B, T) float32: at t, of the state before token t; 0 off the response.

    A response token's value is the head's output at the token before it.
    """
    values = _head_outputs(model, predictor_states(model, batch))
    placed = torch.zeros(batch.token_ids.shape, dtype=torch.float32, device=values.device)
    return placed.masked_scatter(batch.response_mask, values)


@compares_once
def sequence_scores(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Scores (B,) float32, raw: the head's output at each row's last real token, EOS included.

    The mask says which token is the last, never its id: pad may equal EOS.
    """
    return _head_outputs(model, last_states(model, batch))


def head_outputs_by_row(model: PreTrainedModel, hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """(n,) float32: the head's outputs for hidden states (n, D) of rows that have `counts` of them.

    Each row goes through the head by itself: the product of several rows may sum in another order,
    and then a row's numbers would depend on the others.
    """
    # A copy begins where memory is aligned, as the states of a row alone do.
    return torch.cat([_head_outputs(model, part.clone()) for part in hidden.split(list(counts))])


def _head_outputs(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(n, D) -> (n,) float32, by the twin's head, whose rows do not depend on their number."""
    head = _require_head(twin_of(model))
    # Some families (Mamba) keep residuals, and so hidden states, in float32 beside half weights.
    return head(hidden.to(head.weight.dtype)).squeeze(-1).float()


def normalization(model: PreTrainedModel) -> tuple[float, float]:
    """Mean and sd that normalize the model's scores; (0, 1) if none were set."""
    config = model.config
    return float(getattr(config, "score_mean", 0.0)), float(getattr(config, "score_std", 1.0))


def is_normalized(model: PreTrainedModel) -> bool:
    """Whether a mean and an sd were set."""
    return normalization(model) != (0.0, 1.0)


def set_normalization(model: PreTrainedModel, mean: float, std: float) -> None:
    """Keep the scores' mean and sd with the model, in its config.

    Raises:
        ModelError: a number that is not finite, or an sd that is not positive.
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ModelError(
            f"score normalization must have a finite mean and a positive sd; got mean {mean}, "
            f"sd {std}. Scores that are all alike cannot be normalized."
        )
    model.config.score_mean, model.config.score_std = float(mean), float(std)


def grade_scales(model: PreTrainedModel) -> dict[str, tuple[float, float]]:
    """Mean and sd, by data set, of the grades that the model has learned by regression: a raw score
    s is the grade mean + sd * s. Empty if it has learned none."""
    found = getattr(model.config, "grade_scales", None) or {}
    return {str(name): (float(mean), float(std)) for name, (mean, std) in found.items()}


def set_grade_scales(model: PreTrainedModel, scales: Mapping[str, tuple[float, float]]) -> None:
    """Keep them with the model, in its config; none at all removes an earlier model's."""
    if scales:
        model.config.grade_scales = {name: list(scale) for name, scale in scales.items()}
    elif hasattr(model.config, "grade_scales"):
        del model.config.grade_scales


def has_value_head(config: PreTrainedConfig) -> bool:
    """Whether a scalar model is a critic: its head predicts the reward of an unfinished answer."""
    return bool(getattr(config, VALUE_HEAD, False))


def require_reward_head(model: PreTrainedModel, name: str) -> None:
    """Refuse a critic in place of a reward model.

    Raises:
        ModelError: it is one.
    """
    _require_no_critic(name, has_value_head(model.config))


def _require_no_critic(name: str, is_critic: bool) -> None:
    if is_critic:
        raise ModelError(
            f"model {name!r} must score whole answers; got a critic, which predicts the rewards of "
            "unfinished ones. Give a reward model, such as the one that the critic was trained "
            "with; a critic is for --critic-model."
        )


def _require_head(model: PreTrainedModel) -> nn.Linear:
    head = scalar_head(model)
    if head is None:
        raise ModelError(
            f"{type(model).__name__} must score with a linear layer named {SCALAR_HEAD!r}; got "
            "none. Give a sequence-classification model of a decoder family."
        )
    return head


def _on_language_model(source: Located, dropout: float, trust_remote_code: bool) -> PreTrainedModel:
    """The backbone of a language model in its family's classification class; head unset.

    The language model is loaded first, because only its own class accounts for every weight: some
    families' files have their own name for the vocabulary head.
    """
    language_model = load_causal_lm(
        source.name, dropout=dropout, trust_remote_code=trust_remote_code
    )
    config = language_model.config
    one_output(config)
    model = build_model(config, scalar=True, on_meta=True, trust_remote_code=trust_remote_code)
    keep_layer_numbers(model, read_names(source))
    head = _require_head(model)
    take_backbone(model, language_model)
    model.config = config
    head.to_empty(device=language_model.device)
    return model.eval()


@torch.no_grad()
def start_new_head(
    model: PreTrainedModel,
    seed: int,
    put: Callable[[Tensor, Tensor], object] = Tensor.copy_,
    *,
    zeros: bool = False,
) -> None:
    """Initialize a scalar head: small scores, of about the same size at any width.

    Args:
        put: copies a whole tensor into a parameter, which may be sharded.
        zeros: all scores are 0 at first. For a critic: random values, which the first advantages
            are measured from, would hide the rewards' differences until they are unlearned.
    """
    head = _require_head(model)
    generator = torch.Generator().manual_seed(seed)
    start = torch.zeros(head.weight.shape)
    if not zeros:
        start.normal_(0.0, 1.0 / math.sqrt(head.in_features + 1), generator=generator)
    put(head.weight, start)
    if head.bias is not None:
        put(head.bias, torch.zeros(head.bias.shape))
