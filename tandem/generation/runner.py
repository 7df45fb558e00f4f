"""The only place where generation calls a model: prefill, then decode token by token."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation.batch_state import Part, Rows
from tandem.generation.sampler import Draw
from tandem.models.lm_head import vocabulary_logits
from tandem.models.twin import base_forward, kv_shapes, twin_of
from tandem.ops import gpu, native
from tandem.ops.attention_context import Before, Decode, KVMemory, Packed, attending


@dataclass(frozen=True, slots=True)
class Advanced:
    """Several steps of the live rows, one draw after the other.

    steps: how many. ran, places, draw: the tokens that were run, where what each drew is recorded,
    and the draws, (m,) each. ended: (row, step, finished) of rows whose answers ended, as they were
    numbered before, with the step counted from 1 and whether a stop token did it. live: what the
    rows that are left, in front and in this order now, were before.
    """

    steps: int
    ran: Tensor
    places: Tensor
    draw: Draw
    ended: list[tuple[int, int, bool]]
    live: list[int]


class Runner(Protocol):
    """A model with KV memory. Everything stays on the model's device; the host never waits."""

    def prefill(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        tables: Tensor,
        starts: Sequence[int] | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Compute and keep the keys and values of G packed prompts, or of parts of prompts.

        Args:
            token_ids: (N,) int64, the prompts in order.
            lengths: G lengths that add up to N.
            tables: (G, W) int32, the blocks of each.
            starts: tokens before each part, whole blocks, whose keys and values are in memory or
                are computed by a part before it; None: none.
            states: (G,) int64, the slot of each one's states, where layers keep any; parts of one
                prompt are then not run together.
        Returns:
            (G, V) logits of each prompt's last token, float32 or the compute type.
        """

    def decode(
        self, token_ids: Tensor, positions: Tensor, tables: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """Run one more token per row, (n,), (n, W) and slots of states (n,); returns the logits
        (n, V) of the next.

        The next call may overwrite them.
        """

    def draw(self, logits: Tensor, part: Part) -> Draw | None:
        """Sample for the rows of a part as `Rows.draw` does, but faster; None if it cannot."""

    def advance(self, rows: Rows, stop_token_ids: Collection[int], until: int) -> Advanced | None:
        """Run and draw for the live rows again and again; None if it cannot, and nothing is done.

        Rows leave as their answers end. It stops after a moment, for signals wait for its end, or
        when some answer has ended and no more than `until` rows go on. `rows.keep` is the caller's
        to call.
        """

    def close(self) -> None:
        """Free what the runner holds besides the KV memory."""


def new_memory(model: PreTrainedModel, num_blocks: int, num_slots: int = 0) -> KVMemory:
    """KV memory for a model, in the dtype of its attention.

    It has one block and one slot more than asked, the last, for rows that only pad a batch.
    """
    memory = KVMemory(
        kv_shapes(model), num_blocks + 1, dtype=kv_dtype(model), device=model.device,
        num_slots=num_slots + 1 if num_slots else 0,
    )  # fmt: skip
    layers = (*memory.layers, *memory.states)
    native.prefer_large_pages(*(tensor for layer in layers for tensor in layer))
    return memory


def kv_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of keys and values: that of the twin's weights."""
    return twin_of(model).dtype


class TwinRunner:
    """Any model with a twin, by the twin's modules."""

    def __init__(self, model: PreTrainedModel, memory: KVMemory) -> None:
        """Looks the twin up once: the model's modules must not change during its life."""
        self._model, self._memory = model, memory
        self._twin = twin_of(model)
        self._keeps_some = "logits_to_keep" in inspect.signature(self._twin.forward).parameters

    def prefill(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        tables: Tensor,
        starts: Sequence[int] | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """As `Runner` says."""
        step = self._packed(lengths, tables, starts, states)
        return self._prompts(token_ids, *_places(token_ids, lengths, step), step)

    def _prompts(self, token_ids: Tensor, positions: Tensor, lasts: Tensor, step: Packed) -> Tensor:
        """Logits of the tokens `lasts` (G,); token_ids and positions (N,)."""
        with attending(step):
            if self._keeps_some:
                return self._logits(token_ids, positions, logits_to_keep=lasts)
            hidden = base_forward(self._twin, token_ids[None], positions[None])[0]
        return vocabulary_logits(self._model, hidden[lasts])

    def decode(
        self, token_ids: Tensor, positions: Tensor, tables: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """As `Runner` says."""
        with attending(Decode(positions, tables, self._memory, states)):
            return self._logits(token_ids, positions)

    def _packed(
        self,
        lengths: Sequence[int],
        tables: Tensor,
        starts: Sequence[int] | None,
        states: Tensor | None,
    ) -> Packed:
        """What attention needs to know; without `starts` it reads no memory."""
        plain = Packed.of_lengths(lengths, tables.device)
        if starts is None or not any(starts):
            return Packed(
                plain.cu_seqlens, plain.max_length, self._memory, tables, slots=states
            )  # fmt: skip
        before = Before(tables, starts, lengths, tables.device)
        longest = max(a + b for a, b in zip(starts, lengths, strict=True))
        new = before.tables_of_new()
        return Packed(plain.cu_seqlens, longest, self._memory, new, before=before, slots=states)

    def draw(self, logits: Tensor, part: Part) -> Draw | None:
        """As `Runner` says: it cannot."""
        return None

    def advance(self, rows: Rows, stop_token_ids: Collection[int], until: int) -> Advanced | None:
        """As `Runner` says: it cannot."""
        return None

    def close(self) -> None:
        """There is nothing to free."""

    def _logits(self, token_ids: Tensor, positions: Tensor, **more: Tensor) -> Tensor:
        output = self._twin(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **more
        )
        logits: Tensor = output.logits[0]
        return logits


def _places(token_ids: Tensor, lengths: Sequence[int], step: Packed) -> tuple[Tensor, Tensor]:
    """Each token's position in its sequence (N,), and which token ends each of the G parts (G,)."""
    device = token_ids.device
    counts = gpu.sent(lengths, device)
    ends = counts.cumsum(0)
    firsts = ends - counts  # of each part among the N
    if step.before is not None:
        firsts = firsts - step.before.starts_at
    firsts = torch.repeat_interleave(firsts, counts, output_size=len(token_ids))
    return torch.arange(len(token_ids), device=device) - firsts, ends - 1
