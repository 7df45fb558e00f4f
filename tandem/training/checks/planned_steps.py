"""What a stage is about to do, in a line: its steps, of how many rows, and whether that is little.

Few rows make few steps, after which a model is what it was.
"""

from __future__ import annotations

from tandem.config.stages import Stage
from tandem.data.loader import BatchOrder
from tandem.text import counted
from tandem.training.stage_data import StepRows

_FEW = 5
"""Optimizer steps that hardly move a model: most of them are the learning rate's warm-up."""


def planned_steps(stage: Stage, order: BatchOrder, rows: StepRows) -> list[str]:
    """A line on a stage's steps, and one on each thing that a user may not expect of them."""
    lines = _of_prompts(stage, order) if stage.family == "rl" else _of_rows(stage, order)
    if not rows.heldout_of(stage):
        what = "prompt" if stage.family == "rl" else "row"
        lines.append(
            f"note: {stage.name} has no held-out {what}, so no figure is of data that it does not "
            "train on. Give more data, or a larger --dataset.heldout"
        )
    return lines


def _of_rows(stage: Stage, order: BatchOrder) -> list[str]:
    steps, epochs = order.num_steps, order.epochs_done(order.num_steps)
    most = min(order.batch_size, round(epochs * order.num_rows))
    planned = f"{counted(steps, 'optimizer step')} of {counted(most, 'row')}"
    passes = f"{epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}"
    lines = [f"{stage.name}: {planned}, {passes} of {counted(order.num_rows, 'row')}"]
    if steps < _FEW and steps != order.max_steps:  # not what the user asked for
        lines.append(
            f"note: {stage.name} learns little in {counted(steps, 'step')}. Raise "
            f"--{stage.section}.epochs, lower --{stage.section}.batch-size, or give more data"
        )
    return lines


def _of_prompts(stage: Stage, order: BatchOrder) -> list[str]:
    steps, each, prompts = order.num_steps, order.batch_size, order.num_rows
    planned = f"{counted(steps, 'rollout')} of {counted(each, 'prompt')}"
    times = f"{steps * each / prompts:.3g}"
    lines = [f"{stage.name}: {planned}, out of {prompts:,}: each comes about {times} times"]
    if each > prompts:
        lines.append(
            f"note: {stage.name} has fewer prompts than a rollout takes, so each comes "
            f"{each / prompts:.3g} times per rollout. Lower --{stage.section}.prompts-per-step, or "
            "give more data"
        )
    return lines
