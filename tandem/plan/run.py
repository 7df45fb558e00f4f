"""The memory of a run's step, read off its configuration."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.engine.devices import resolve_device, resolve_dtype
from tandem.ops import native
from tandem.plan.memory import Layout, MemoryPlan
from tandem.plan.shape import shape_of
from tandem.plan.steps import PPOWork, ppo_memory, supervised_memory

# Whose decoding on a CPU reads packed weights (generation/native_runner.py).
_PACKED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def plan_memory(
    config: RunConfig,
    step: str,
    model: PreTrainedConfig,
    *,
    ranks: int = 1,
    critic: PreTrainedConfig | None = None,
    prompt_tokens: int | None = None,
) -> MemoryPlan:
    """What a step of a run needs per rank.

    Args:
        model: the policy's config; where the step trains a reward model, that one's.
        critic: config of critic and reward model in step 3; None takes the policy's.
        prompt_tokens: of the longest prompt; None takes dataset.max_prompt_tokens.
    Raises:
        ConfigError: there is no such step.
    """
    stage, parallel = stage_of(step), config.parallel
    if stage.family == "rl":
        actor, value = shape_of(model), shape_of(critic or model, scalar=True)
        policy = _layout(config, ranks, parallel.actor_zero_stage, average=config.ppo.ema)
        packs = (
            model.model_type in _PACKED_FAMILIES
            and resolve_device(config.device).type == "cpu"
            and config.dtype != "fp16"
            and not (policy.lora_rank or parallel.inference_tp_size > 1)
            and config.hybrid_engine
            and native.available()
        )
        work = _ppo_work(config, prompt_tokens or config.dataset.max_prompt_tokens, ranks, packs)
        return ppo_memory(
            actor, value, policy, _layout(config, ranks, parallel.critic_zero_stage), work
        )
    scalar = stage.leaves == "reward model"
    zero = parallel.critic_zero_stage if "critic" in stage.trains else parallel.actor_zero_stage
    return supervised_memory(
        shape_of(model, scalar=scalar),
        _layout(config, ranks, zero),
        tokens=config.micro_batch_tokens,
        answered=config.micro_batch_tokens,
        reference="reference" in stage.freezes,
        reference_on_host="reference" in parallel.offload,
    )


def _layout(config: RunConfig, ranks: int, stage: int, *, average: bool = False) -> Layout:
    device = resolve_device(config.device)
    return Layout(
        ranks=ranks,
        replicas=config.parallel.replicas,
        stage=stage,
        half=resolve_dtype(config.dtype, device).itemsize == 2,
        lora_rank=config.lora.rank,
        frozen=config.parallel.frozen_weights,
        shares_base=config.parallel.shared_base,
        offload_optimizer="optimizer" in config.parallel.offload,
        offload_params="params" in config.parallel.offload,
        on_cpu=device.type == "cpu",
        moving_average=average,
        checkpointing=config.gradient_checkpointing,
    )


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
