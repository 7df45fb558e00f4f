"""Out of memory: name the cheapest knobs that help, or go on with smaller micro-batches.

Gradients are sums, divided once by the whole step's count, so a step in smaller micro-batches is
the same step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.engine import EngineSettings
from tandem.config.lora import TrainedRole
from tandem.devices import resolve_dtype
from tandem.engine.learner import Learner
from tandem.errors import OutOfMemoryError
from tandem.memory.model import layout_of
from tandem.memory.shape import shape_of
from tandem.memory.steps import supervised_memory
from tandem.memory.ways import advice, ways_out
from tandem.models.lora import scalar_head
from tandem.parallel.shard import shards_of
from tandem.parallel.world import World
from tandem.text import first_line

Result = TypeVar("Result")

_FEWEST = 64
"""Tokens of a micro-batch below which halving would not help."""


class MicroBatchBudget:
    """How many tokens go through a model at once, and what happens when that is too many."""

    def __init__(
        self, settings: EngineSettings, world: World, print_line: Callable[[str], None] | None
    ) -> None:
        """Starts with `micro_batch_tokens`; `print_line` shows a line to the user, if any."""
        self.tokens = settings.micro_batch_tokens
        self._settings = settings
        self._world = world
        self._print_line = print_line

    def retry_on_oom(self, learner: Learner, work: Callable[[], Result]) -> Result:
        """What `work` returns; when memory runs out and `halve_micro_batches` is on, `work` is
        tried again with half of the tokens, until it fits.

        Args:
            work: changes nothing but the learner's gradients until it ends.
        Raises:
            OutOfMemoryError: it does not fit; the message names the cheapest ways out, with
                the peaks predicted for them.
                Several ranks never try again: the others may wait in a collective.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                said = first_line(error)
            # Outside of the handler, whose traceback keeps the activations alive.
            learner.forget()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            can_halve = self._settings.halve_micro_batches and self._world.size == 1
            if not can_halve or self.tokens < 2 * _FEWEST:
                raise OutOfMemoryError(
                    f"{learner.name}: a micro-batch of {self.tokens} tokens must fit into memory; "
                    f"got {said[:160]!r}. {self._advice(learner.model)}"
                )
            self.tokens //= 2
            if self._print_line is not None:
                self._print_line(
                    f"{learner.name}: out of memory: micro-batches of {self.tokens} tokens from "
                    "here on (the gradient is the same)"
                )

    def once(self, learners: Sequence[Learner], step: Callable[[], Result]) -> Result:
        """Take the step of one optimizer or several. It is not tried again: what it updated before
        it failed would be updated twice.

        Raises:
            OutOfMemoryError: it does not fit; some weights may have changed.
        """
        try:
            return step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = first_line(error)
        for learner in learners:
            learner.forget()
        names = ", ".join(learner.name for learner in learners)
        raise OutOfMemoryError(
            f"{names}: the optimizer's step must fit into memory; got {said[:160]!r}, and "
            f"is not repeated: some weights may have changed. {self._advice(learners[0].model)}"
        )

    @contextmanager
    def reserving_states(self, learner: Learner) -> Iterator[None]:
        """Within: the memory that the optimizer's states will need is in use, if they are not
        there yet."""
        missing = learner.missing_state_bytes()
        held = torch.empty(missing, dtype=torch.uint8, device=self._world.device)
        yield
        del held

    def _advice(self, model: nn.Module) -> str:
        """The predicted peak and the three cheapest ways out, by the plan's formula."""
        settings, device = self._settings, self._world.device
        assert isinstance(model, PreTrainedModel)
        role: TrainedRole = "actor" if scalar_head(model) is None else "critic"
        shape = shape_of(
            model.config,
            scalar=role == "critic",
            trust_remote_code=settings.trust_remote_code,
        )
        layout = layout_of(
            settings,
            self._world.size,
            role,
            on_cpu=device.type == "cpu",
            half=resolve_dtype(settings.dtype, device).itemsize == 2,
            per_node=self._world.ranks_per_node,
        )
        layout = replace(layout, stage=shards_of(model).plan.stage)
        now = supervised_memory(shape, layout, tokens=self.tokens, answered=self.tokens)
        ways = ways_out(
            shape,
            layout,
            self.tokens,
            ranks=self._world.size,
            rank_flag=settings.lora.rank_flag(role) if settings.moving.takes_adapters else "",
            checkpointing_flag=(
                "--recompute-roles all" if settings.checkpointed else "--gradient-checkpointing"
            ),
        )
        said = advice(now.peak("train"), [(way.flags, way.peak) for way in ways])
        if self._world.size == 1 and not settings.halve_micro_batches:
            said += "; --halve-micro-batches goes on with smaller ones by itself"
        return f"{said}."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left, on a GPU or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    phrases = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return any(phrase in text for phrase in phrases)
