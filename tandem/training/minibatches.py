"""Which answers of a rollout each of its updates learns from, and updates that are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.config.schema import RunConfig, rl_section
from tandem.config.updates import minibatch_size, num_updates
from tandem.errors import BadStepError
from tandem.generation.sampler import sequence_key
from tandem.types import Experience

Skip = Callable[[BadStepError, Experience], None]
"""Hears of an update that was left out, and of the answers it was made on."""


def updates_per_epoch(config: RunConfig) -> int:
    """Optimizer steps in one pass over a rollout."""
    return num_updates(config, 1) // rl_section(config).epochs


def minibatches(
    config: RunConfig, experience: Experience, step: int
) -> Iterator[tuple[int, Tensor]]:
    """Every update's number within the step and its rows, on the host. Prompts are shuffled each
    epoch by (seed, step, epoch); the answers to one stay together, so that they can share it."""
    chosen, group = torch.arange(len(experience)), experience.group.cpu()
    if experience.in_loss is not None:
        in_loss = experience.in_loss.cpu()
        chosen, group = chosen[in_loss], group[in_loss]
    if len(chosen) == 0:
        return
    found, group = group.unique(return_inverse=True)
    for epoch in range(rl_section(config).epochs):
        key = sequence_key(config.seed, step, epoch, 0)
        places = torch.randperm(len(found), generator=torch.Generator().manual_seed(key))
        order = places.argsort()[group].argsort(stable=True)
        for number, rows in enumerate(chosen[order].split(minibatch_size(config))):
            yield epoch * updates_per_epoch(config) + number, rows


@contextmanager
def left_out(minibatch: Experience, skip: Skip | None) -> Iterator[None]:
    """An update whose numbers are not sound changed nothing: `skip` hears of it."""
    try:
        yield
    except BadStepError as bad:
        if skip is None:
            raise
        skip(bad, minibatch)
