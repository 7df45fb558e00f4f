"""Rules of frozen bases: when they may be quantized or shared, and when adapters are carried on."""

from __future__ import annotations

from transformers import PreTrainedModel

from tandem.config.parallel import frozen_base_problems
from tandem.config.schema import LoraConfig, RunConfig
from tandem.errors import ConfigError, ModelError
from tandem.models.lora import lora_layers, match_targets, train_adapters
from tandem.parallel.world import World


def carries_adapters(config: RunConfig) -> bool:
    """Whether a step loads an earlier step's adapters on their base instead of merged weights.

    Merged weights quantized again would lose them, and are no base that others share.
    """
    return bool(config.parallel.frozen_weights) or config.parallel.shared_base


def check_base(config: RunConfig, world: World) -> None:
    """Refuse knobs of frozen bases that do not go together.

    Raises:
        ConfigError: all that is wrong at once.
    """
    parallel, problems = (
        config.parallel,
        list(frozen_base_problems(config.parallel, config.lora.rank)),
    )
    stages = (parallel.actor_zero_stage, parallel.critic_zero_stage)
    if parallel.shared_base and world.size > 1 and any(stages):
        problems.append(
            "parallel.shared_base must go with ZeRO stage 0 over several ranks: each holds the "
            f"one base whole, and splitting would give every model pieces of its own; got stages "
            f"{stages[0]} and {stages[1]}. Use --actor-zero-stage 0 --critic-zero-stage 0, or "
            "leave --shared-base off"
        )
    if problems:
        raise ConfigError("; ".join(problems) + ".")


def carry_on(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Train the adapters that a model came with, as if they had been added; in place.

    Raises:
        ModelError: they are not those that `settings` would add.
    """
    layers = lora_layers(model)
    first = layers[0][1]
    found = f"rank {first.rank}, alpha {first.alpha:g}"
    if (first.rank, first.alpha) != (settings.rank, settings.alpha):
        wanted = f"rank {settings.rank}, alpha {settings.alpha:g}"
        raise ModelError(
            f"lora.rank and lora.alpha must be those of the adapters that are trained on; got "
            f"{wanted} for {found}. Use --lora-rank {first.rank} --lora.alpha {first.alpha:g}, "
            "or start from a model without adapters."
        )
    wanted_layers = set(match_targets(model, settings.targets))
    differing = sorted(wanted_layers ^ {name for name, _ in layers})
    if differing:
        raise ModelError(
            "lora.targets must be the layers of the adapters that are trained on; got "
            f"{' '.join(settings.targets)}, which differs at {differing[0]}. Use the targets that "
            "they were made with."
        )
    for _, layer in layers:
        layer.lora_dropout.p = settings.dropout
    train_adapters(model)
