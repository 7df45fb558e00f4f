"""Scalar heads for families that have no sequence-classification class in transformers, or one with
another head than a linear layer `score`.

Such a family gets a class built as most families' are (transformers'
GenericForSequenceClassification): its backbone, and a linear layer `score` on the last hidden
states. It is registered with transformers, so that in this process
AutoModelForSequenceClassification builds and loads it like any other. Elsewhere a folder saved from
it opens as AutoModel, and `score.weight` (1, D) is one more tensor in its files.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from tandem.errors import ModelError

_OTHER_HEADS = ("ctrl", "modernbert-decoder")
"""Families whose class in transformers scores with more than a linear layer named `score`."""


def require_classifier(config: PreTrainedConfig, name: str) -> None:
    """Make sure that AutoModelForSequenceClassification has a class for a model's family.

    Args:
        name: the model's name, for the message.
    Raises:
        ModelError: it has none, and the family has no backbone class of its own to put a head on.
    """
    kind = type(config)
    known = kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if (known and config.model_type not in _OTHER_HEADS) or (
        "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    ):
        return
    backbone = MODEL_MAPPING.get(kind, None)
    if not isinstance(backbone, type) or not issubclass(backbone, PreTrainedModel):
        raise ModelError(
            f"model {name!r} must have a backbone for its scalar head; got family "
            f"{config.model_type!r}, which has none in transformers. Choose another family for "
            "the reward model and critic."
        )
    # Without exist_ok, transformers accepts no class for a family of its own.
    made = _classifier(backbone, kind)
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)
    mapping: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if mapping.get(kind, None) is not made:  # and older versions not even with it
        mapping._extra_content[kind] = made


def take_backbone(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Give a scalar model the backbone of a language model, adapters included; in place.

    Raises:
        ModelError: the family's two classes have different backbones.
    """
    if type(model.base_model) is not type(other.base_model):
        raise ModelError(
            f"family {model.config.model_type!r} must have one backbone for both heads; got "
            f"{type(other.base_model).__name__} and {type(model.base_model).__name__}. Choose "
            "another family for the reward model and critic."
        )
    setattr(model, model.base_model_prefix, other.base_model)


def one_output(config: PreTrainedConfig) -> None:
    """Set a config to one output, which Hugging Face calls regression; in place."""
    config.num_labels = 1
    config.problem_type = "regression"


def _classifier(
    backbone: type[PreTrainedModel], config: type[PreTrainedConfig]
) -> type[PreTrainedModel]:
    """A class for `backbone` and a head, a subclass of the family's PreTrainedModel; `config` may
    be of a family that uses another one's backbone."""
    family = next(
        base
        for base in backbone.__mro__
        if issubclass(base, PreTrainedModel) and base.__name__.endswith("PreTrainedModel")
    )
    name = backbone.__name__.removesuffix("Model") + "ForSequenceClassification"
    return type(
        name,
        (GenericForSequenceClassification, family),
        {
            # transformers looks up the module of a class to see what its layers support.
            "__module__": backbone.__module__,
            "config_class": config,
            # As in the family's language model, so that its files fit.
            "base_model_prefix": family.base_model_prefix or "model",
        },
    )
