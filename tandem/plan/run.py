"""The memory of a stage on this machine, from a model's config as transformers has it."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.devices import resolve_device, resolve_dtype
from tandem.generation.blocks import free_bytes
from tandem.memory.model import MemoryPlan
from tandem.memory.shape import shape_of
from tandem.ops import native
from tandem.predict.memory import Device, Models, StageCase, stage_memory
from tandem.predict.rows import Rows
from tandem.predict.work import work_of


def plan_memory(
    config: RunConfig,
    name: str,
    model: PreTrainedConfig,
    *,
    ranks: int = 1,
    critic: PreTrainedConfig | None = None,
    prompt_tokens: int | None = None,
    device: torch.device | None = None,
) -> MemoryPlan:
    """What a stage of a run needs per rank, for rows as long as the knobs allow.

    Args:
        model: the policy's config, or the reward model's in the stage that trains one.
        critic: config of critic and reward model in PPO; None: as the policy's.
        prompt_tokens: of the longest prompt; None: dataset.max_prompt_tokens.
        device: to plan for a device that this machine lacks; None: the one that the run names.
    Raises:
        ConfigError: there is no such stage.
        ModelError: the run names a device that is not there, and `device` is None.
    """
    stage = stage_of(name)
    device = device or resolve_device(config.device)
    half = resolve_dtype(config.dtype, device).itemsize == 2
    if stage.family == "rl":
        longest = prompt_tokens or config.dataset.max_prompt_tokens
        rows = Rows(tokens=longest, longest=longest)
    else:
        # As much as a micro-batch holds, whatever the rows are.
        rows = Rows(tokens=config.micro_batch_tokens, answered=config.micro_batch_tokens,
                    longest=config.micro_batch_tokens)  # fmt: skip
    models = Models(shape_of(model), shape_of(critic or model, scalar=True), model.model_type)
    place = Device(
        on_cpu=device.type == "cpu",
        half=half,
        packs=native.available(),
        memory=free_bytes(device) if device.type == "cpu" else 0.0,
    )
    work = work_of(config, stage, ranks, rows)
    plan = stage_memory(StageCase(config, stage, models, work, place, ranks))
    own = {name: parts for name, parts in plan.phases.items() if not _is_beside(name)}
    return replace(plan, phases=own)


def _is_beside(phase: str) -> bool:
    """Whether a phase is no part of a step: the rehearsal, and saving."""
    return phase.startswith(("rehearse", "save"))
