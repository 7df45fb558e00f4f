"""Language models and tokenizers in: any Hugging Face decoder, float32, every weight accounted for.

Attention is transformers' own choice, "sdpa" where the family has it and "eager" elsewhere, with
one exception: a config that caps attention logits (Gemma2) always gets "eager", because torch's
scaled_dot_product_attention has no cap and some transformers releases drop it without a word.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tandem.errors import ModelError
from tandem.models.adapter import load_adapter
from tandem.models.hf_logging import quiet
from tandem.models.source import (
    Located,
    adapter_base,
    load_config,
    load_weights,
    locate,
    read_adapter_config,
    require_config,
)
from tandem.models.validate_checkpoint import is_panic
from tandem.text import one_line

# Noise on what a mixture's router sees in training, and the families that call a threshold so.
_NOISES: dict[str, tuple[str, ...]] = {
    "input_jitter_noise": (),
    "router_jitter_noise": ("phimoe",),
}


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name; an adapter without one gets its base's.

    Raises:
        ModelError: there is no model, or no tokenizer that transformers can read.
    """
    source = locate(path)
    adapter = read_adapter_config(source)
    if adapter is not None and not (Path(source.name) / "tokenizer_config.json").is_file():
        source = adapter_base(source, adapter)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                source.name, trust_remote_code=trust_remote_code, local_files_only=source.offline
            )
    except BaseException as error:  # tokenizer files are of many formats, and so are their errors
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        require_config(source)
        raise ModelError(
            f"model {source.name!r} must have a tokenizer that transformers reads; got: "
            f"{one_line(error)}. Put tokenizer.json and tokenizer_config.json in the folder."
        ) from error


def load_causal_lm(
    path: str | Path, *, dropout: float = 0.0, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A decoder with its vocabulary head, float32, in eval mode.

    A folder that holds a LoRA adapter loads the base it names and puts the adapter on it, live.

    Args:
        path: folder or hub name.
        dropout: what every dropout rate of the model becomes; layers are never skipped whole.
        trust_remote_code: let the folder bring its own Python code.
    Raises:
        ModelError: not a decoder, pickled weights, damaged files, weights missing or left over.
    """
    source = locate(path)
    adapter = read_adapter_config(source)
    base = source if adapter is None else adapter_base(source, adapter)
    config = load_config(base, trust_remote_code=trust_remote_code)
    require_decoder(config, base.name)
    set_dropout(config, dropout)
    model, missing, unexpected = load_weights(
        AutoModelForCausalLM,
        base,
        config,
        trust_remote_code=trust_remote_code,
        attn_implementation=attention_for(config),
    )
    require_all_weights(base, config, missing, unexpected)
    name_backbone(model)
    if adapter is not None:
        load_adapter(model, source.name)
    return model


def new_causal_lm(config: PreTrainedConfig, seed: int, *, dropout: float = 0.0) -> PreTrainedModel:
    """A model with random weights, the same for the same seed; float32, in eval mode.

    The config's dropout rates are overwritten; torch's global random state is left as it was.

    Raises:
        ModelError: the config is not a decoder's.
    """
    require_decoder(config, config.model_type)
    set_dropout(config, dropout)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention_for(config)
        )
    name_backbone(model)
    return model.eval()


def name_backbone(model: PreTrainedModel) -> None:
    """Correct a class's word for where its backbone is: Llama 4's text model names a module that
    only its multimodal model has, so that `base_model` would be the whole model."""
    if model.base_model_prefix not in model._modules and "model" in model._modules:
        model.base_model_prefix = "model"


def attention_for(config: PreTrainedConfig) -> str | None:
    """ "eager" where attention logits are capped, else None: transformers chooses, sdpa first."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped else None


def set_dropout(config: PreTrainedConfig, rate: float) -> None:
    """Set every dropout rate of a config, whatever its family calls it, in place.

    Families say dropout, attention_dropout, resid_pdrop, hidden_dropout_prob and so on: every
    number whose name has "drop" in it is a rate. LayerDrop is no dropout: it becomes 0, because a
    layer that is now and then skipped is another policy; and so does noise on a router's input.

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
    """Refuse what does not predict the next token from the tokens before it.

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
        found = "no causal language model"
    else:
        return
    raise ModelError(
        f"model {name!r} must be a decoder; got family {family!r}, {found}. Choose a model such as "
        "OPT, Llama, GPT-2, GPT-NeoX, Qwen, Mistral or Gemma."
    )


def require_all_weights(
    source: Located, config: PreTrainedConfig, missing: set[str], unexpected: set[str]
) -> None:
    """Turn transformers' warnings about weights into an error.

    Raises:
        ModelError: the files lack a weight of the model, or have one that it does not know.
    """
    if missing or unexpected:
        raise ModelError(
            f"weights of {source.name!r} must be those of a {config.model_type} language model; "
            f"got {_some(missing)} missing and {_some(unexpected)} left over (the folder says "
            f"architectures={config.architectures}). Give a causal language model's folder, or "
            "save it again."
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        ModelError: the largest id is outside the embedding.
    """
    rows = embedding_rows(model)
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ModelError(
            f"tokenizer ids must be below the model's {rows} embeddings; got {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}). Use the tokenizer that came with "
            "the model."
        )


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model has an embedding for."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})" if names else "none"
