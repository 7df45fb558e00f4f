"""The memory of a stage, from its run's configuration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import PreTrainedConfig

from tandem.config.engine import engine_settings
from tandem.config.schema import RunConfig
from tandem.config.stages import Stage, stage_of
from tandem.engine.devices import resolve_device, resolve_dtype
from tandem.generation.native_runner import FAMILIES
from tandem.memory.model import MemoryPlan, layout_of
from tandem.memory.shape import shape_of
from tandem.memory.steps import PPOWork, ppo_memory, supervised_memory
from tandem.ops import native


def plan_memory(
    config: RunConfig,
    name: str,
    model: PreTrainedConfig,
    *,
    ranks: int = 1,
    critic: PreTrainedConfig | None = None,
    prompt_tokens: int | None = None,
) -> MemoryPlan:
    """What a stage of a run needs per rank.

    Args:
        model: the policy's config, or the reward model's in the stage that trains one.
        critic: config of critic and reward model in PPO; None: as the policy's.
        prompt_tokens: of the longest prompt; None: dataset.max_prompt_tokens.
    Raises:
        ConfigError: there is no such stage.
    """
    stage, parallel = stage_of(name), config.parallel
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    layout = partial(layout_of, engine_settings(config), ranks, device=device, dtype=dtype)
    if stage.family == "rl":
        actor, value = shape_of(model), shape_of(critic or model, scalar=True)
        policy = layout(parallel.actor_zero_stage, average=config.ppo.ema)
        packs = (
            model.model_type in FAMILIES
            and device.type == "cpu"
            and config.dtype != "fp16"
            and not (policy.lora_rank or parallel.inference_tp_size > 1)
            and config.hybrid_engine
            and native.available()
        )
        work = _ppo_work(config, prompt_tokens or config.dataset.max_prompt_tokens, ranks, packs)
        work = replace(
            work,
            has_critic="critic" in stage.trains,
            has_reference=_has_reference(config, stage),
        )
        return ppo_memory(actor, value, policy, layout(parallel.critic_zero_stage), work)
    scalar = stage.leaves == "reward model"
    zero = parallel.critic_zero_stage if "critic" in stage.trains else parallel.actor_zero_stage
    return supervised_memory(
        shape_of(model, scalar=scalar),
        layout(zero),
        tokens=config.micro_batch_tokens,
        answered=config.micro_batch_tokens,
        reference=_has_reference(config, stage),
        reference_on_host="reference" in parallel.offload,
    )


def _has_reference(config: RunConfig, stage: Stage) -> bool:
    """Whether a stage loads a reference: its record says so, and no loss that it reads goes without
    one."""
    goes_without = stage.reads("dpo.loss") and not config.dpo.needs_reference
    return "reference" in stage.freezes and not goes_without


def _ppo_work(config: RunConfig, prompt: int, ranks: int, packs: bool) -> PPOWork:
    new = config.sampling.max_new_tokens
    answers = -(-config.ppo.prompts_per_step * config.sampling.samples_per_prompt // ranks)
    dealt = -(-config.ppo.minibatch_size // ranks) * (prompt + new)
    tokens = min(config.micro_batch_tokens, dealt)
    return PPOWork(
        rows=min(config.generation_batch_size, answers),
        prompt=prompt,
        new=new,
        tokens=tokens,
        answered=tokens * new // (prompt + new),
        packs=packs,
        slices=config.parallel.inference_tp_size,
        hosted=tuple(set(config.parallel.offload) & {"reference", "reward"}),
        has_reward_model=config.ppo.reward_model_weight > 0,
    )
