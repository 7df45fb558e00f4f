"""Running out of memory: said with the knob that frees most, or mended by smaller micro-batches.

Gradients are sums divided once by the whole step's count, so that a step in smaller micro-batches
is the same step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.engine.optimizer import Trainee
from tandem.errors import RoomError
from tandem.parallel.world import World
from tandem.text import first_line

Result = TypeVar("Result")

_FEWEST = 64
"""Tokens of a micro-batch below which halving would not help."""
_FLOATS_PER_LAYER = 17
"""Floats kept for the backward per token, layer and unit of width, attention's matrix aside
(Korthikanti et al., arXiv:2205.05198, eq. 1: 34 bytes in half precision)."""


class Room:
    """How many tokens go through a model at once, and what happens when that is too many."""

    def __init__(self, config: RunConfig, world: World, say: Callable[[str], None] | None) -> None:
        """Begins with `config.micro_batch_tokens`; `say` shows a line to the user, if any."""
        self.tokens = config.micro_batch_tokens
        self._config = config
        self._world = world
        self._say = say

    def attempt(
        self,
        name: str,
        model: PreTrainedModel,
        work: Callable[[], Result],
        forget: Callable[[], None],
    ) -> Result:
        """What `work` returns; where memory runs out and `halve_micro_batches` is on, once more
        with half of the tokens, until it fits.

        Args:
            name: of what is trained, for messages.
            work: changes nothing but gradients before it is through.
            forget: drops those.
        Raises:
            RoomError: it does not fit; the message names the knob that frees the most. Over several
                ranks at once: the others may wait in a collective.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                said = first_line(error)
            # Outside of the handler, whose traceback holds on to the activations.
            forget()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            can_halve = self._config.halve_micro_batches and self._world.size == 1
            if not can_halve or self.tokens < 2 * _FEWEST:
                raise RoomError(
                    f"{name}: a micro-batch of {self.tokens} tokens must fit into memory; got "
                    f"{said[:160]!r}. {self._advice(model)}"
                )
            self.tokens //= 2
            if self._say is not None:
                self._say(
                    f"{name}: out of memory: micro-batches of {self.tokens} tokens from here on "
                    "(the gradient is the same)"
                )

    @contextmanager
    def kept_for(self, trainee: Trainee) -> Iterator[None]:
        """Within: the memory that the optimizer's states will have is taken, if it has none yet."""
        missing = trainee.missing_state_bytes()
        held = torch.empty(missing, dtype=torch.uint8, device=self._world.device)
        yield
        del held

    def _advice(self, model: PreTrainedModel) -> str:
        best, freed = max(self._ways(model).items(), key=lambda way: way[1])
        advice = f"{best} frees about {freed / 2**30:.2g} GiB"
        if self._world.size == 1 and not self._config.halve_micro_batches:
            advice += "; --halve-micro-batches goes on with smaller ones by itself"
        return f"{advice}."

    def _ways(self, model: PreTrainedModel) -> dict[str, float]:
        """Bytes that each knob would free on this rank, by estimate."""
        config, text = self._config, model.config.get_text_config()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        weights = sum(p.numel() for p in model.parameters())
        layers, width = int(text.num_hidden_layers), int(text.hidden_size)
        itemsize = 4 if config.dtype == "fp32" else 2
        per_token = itemsize * width * layers
        activations = self.tokens * per_token * _FLOATS_PER_LAYER
        ways = {f"--micro-batch-tokens {self.tokens // 2}": activations / 2}
        if not config.gradient_checkpointing:
            ways["--gradient-checkpointing"] = self.tokens * per_token * (_FLOATS_PER_LAYER - 1)
        on_gpu = self._world.device.type == "cuda"
        if on_gpu and "optimizer" not in config.parallel.offload:
            ways["--offload optimizer"] = 8.0 * trained
        if not config.lora.rank:
            ways["--lora-rank 16"] = 12.0 * trained
        elif not config.parallel.frozen_weights:
            ways["--frozen-weights nf4"] = 3.4 * (weights - trained)
        if self._world.size > 1 and config.parallel.actor_zero_stage < 3:
            split = 4.0 * weights * (1 - 1 / self._world.size)
            ways["--actor-zero-stage 3 --critic-zero-stage 3"] = split
        return ways


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left, on a GPU or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    phrases = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return any(phrase in text for phrase in phrases)
