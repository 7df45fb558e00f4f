"""The memory of a stage, from its run's configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from tandem.config.engine import engine_settings
from tandem.config.schema import RLConfig, RunConfig
from tandem.config.stages import Stage, leaving, stage_of
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
    rl: Any = getattr(config, stage.section)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    layout = partial(layout_of, engine_settings(config), ranks, on_cpu=device.type == "cpu", half=dtype.itemsize == 2)
    if stage.family == "rl":
        actor, value = shape_of(model), shape_of(critic or model, scalar=True)
        policy = layout(parallel.actor_zero_stage, average=rl.ema)
        packs = (
            model.model_type in FAMILIES
            and device.type == "cpu"
            and config.dtype != "fp16"
            and not (policy.lora_rank or parallel.inference_tp_size > 1)
            and config.hybrid_engine
            and native.available()
        )
        prompt = prompt_tokens or config.dataset.max_prompt_tokens
        work = _rl_work(config, stage, prompt, ranks, packs)
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
    """Whether a stage loads a reference: its record says so, and its algorithm and the preference
    loss that it reads need one."""
    section = getattr(config, stage.section)
    if isinstance(section, RLConfig) and not section.has_reference:
        return False
    goes_without = stage.reads("dpo.loss") and not config.dpo.needs_reference
    return "reference" in stage.freezes and not goes_without


def _rl_work(config: RunConfig, stage: Stage, prompt: int, ranks: int, packs: bool) -> PPOWork:
    rl: RLConfig = getattr(config, stage.section)
    new = config.sampling.max_new_tokens
    answers = -(-rl.prompts_per_step * config.sampling.samples_per_prompt // ranks)
    dealt = -(-rl.minibatch_size // ranks) * (prompt + new)
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
        has_reward_model=rl.reward_model_weight > 0 and _may_score(config, rl),
        has_critic="critic" in stage.trains,
        has_reference=_has_reference(config, stage),
    )


def _may_score(config: RunConfig, rl: RLConfig) -> bool:
    """Whether a reward model scores, as far as the configuration says: not where a function alone
    is named. One that an earlier run left in the folder is not seen here."""
    named = bool(config.reward_model) or bool(leaving(config.stages, "reward model"))
    return named or not rl.reward_function
