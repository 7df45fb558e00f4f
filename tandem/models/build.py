"""A model from its config alone: which families are accepted, dropout, attention, random weights.

Attention is transformers' own choice, "sdpa" if the family has it and "eager" otherwise, with one
exception: a config that caps attention logits (Gemma2) always gets "eager", because torch's
scaled_dot_product_attention has no cap and some transformers releases drop it without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import guard_torch_init_functions
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tandem.errors import ModelError
from tandem.models.composite import without_text_class
from tandem.models.hf_logging import quiet

# Noise that a mixture's router adds in training, and the families where the name is a threshold.
_NOISES: dict[str, tuple[str, ...]] = {
    "input_jitter_noise": (),
    "router_jitter_noise": ("phimoe",),
}

_INITIALIZED = "_is_hf_initialized"
"""What transformers sets at weights that its random initialization is to leave alone."""


def build_model(
    config: PreTrainedConfig,
    *,
    scalar: bool = False,
    seed: int = 0,
    on_meta: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model with random weights, float32, in eval mode; torch's random state stays as it was.

    Args:
        scalar: with a scalar head instead of the vocabulary head.
        seed: of the weights.
        on_meta: parameters without memory. Buffers are real, because no file holds rotation tables.
    """
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    place = parameters_on_meta() if on_meta else nullcontext()
    with place, quiet(), torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it seeds GPUs too, and without one formats the stack for later.
        torch.default_generator.manual_seed(seed)
        model = kind.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_for(config),
            trust_remote_code=trust_remote_code,
        )
    assert isinstance(model, PreTrainedModel)
    for parameter in model.parameters():
        vars(parameter).pop(_INITIALIZED, None)
    name_backbone(model)
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within: a parameter loses its memory when it is registered; buffers keep theirs.

    transformers takes such a parameter for initialized, and the layers' own initialization is
    guarded alike: torch would compute random weights without memory by functions in Python, half of
    the time that a small model takes to build.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            if not parameter.is_meta:
                wanted = parameter.requires_grad
                parameter = nn.Parameter(parameter.to("meta"), requires_grad=wanted)
            setattr(parameter, _INITIALIZED, True)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with guard_torch_init_functions():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def name_backbone(model: PreTrainedModel) -> None:
    """Correct `base_model_prefix`: Llama 4's text model names a module that only its multimodal
    model has, so that `base_model` would be the whole model."""
    if model.base_model_prefix not in model._modules and "model" in model._modules:
        model.base_model_prefix = "model"


def attention_for(config: PreTrainedConfig) -> str | None:
    """ "eager" if attention logits are capped, else None: transformers chooses, sdpa first."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped else None


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout rate of a config, whatever its family calls it, in place.

    Families call it dropout, attention_dropout, resid_pdrop, hidden_dropout_prob and so on: every
    number whose name contains "drop" is a rate. LayerDrop becomes 0, because a policy that skips a
    layer at random is another policy; so does noise on a router's input.

    Raises:
        ModelError: the rate is not in [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ModelError(f"dropout must be in [0, 1); got {rate}. Use 0 to turn it off.")
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            set_dropout(value, rate)
        elif name in _NOISES and config.model_type not in _NOISES[name]:
            if value:
                setattr(config, name, 0.0)
        elif "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
            wanted = 0.0 if "layerdrop" in name else float(rate)
            if value != wanted:  # some configs type a rate as int and refuse even 0.0
                setattr(config, name, wanted)


def require_decoder(config: PreTrainedConfig, name: str) -> None:
    """Refuse a family that does not predict the next token from the tokens before it.

    Raises:
        ModelError: an encoder, an encoder-decoder, or a family without a causal language model.
    """
    family = config.model_type
    if config.is_encoder_decoder:
        found = "an encoder-decoder"
    elif family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        found = "an encoder"
    elif family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        part = without_text_class(config)
        found = f"with a text decoder {part!r}, no" if part else "no"
        found += " causal language model"
    elif config.model_type.endswith("_assistant"):
        found = "which drafts for another model, from its states"
    elif part := without_text_class(config):
        found = f"whose text decoder {part!r} AutoModelForCausalLM cannot open by itself"
    elif family == "cpmant":
        found = "whose forward puts prompts of its own before every row"
    elif family == "doge" and getattr(config, "is_moe", False):
        # Its code says so; transformers keeps it for the sake of checkpoints.
        found = "whose router mixes a row's tokens, later ones too"
    else:
        return
    raise ModelError(
        f"model {name!r} must be a decoder; got family {family!r}, {found}. Choose a model such as "
        "OPT, Llama, GPT-2, GPT-NeoX, Qwen, Mistral or Gemma."
    )
