"""A micro-batch on a device asks the device for nothing, and is sent there in one transfer.

The meta device stands for a GPU: what would be read back from it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tandem import types
from tandem.config.schema import GRPOConfig, PPOConfig
from tandem.engine import update
from tandem.engine.forward import Rows, response_logprobs, rows_together, token_values
from tandem.engine.update import LossTerm, MicroBatchLoss, _accumulated
from tandem.generation.gpu_graphs import NoWaiting
from tandem.models.lm_head import VocabularyHead
from tandem.models.packed import packed_rows, predictor_states, response_tokens
from tandem.ops import gpu
from tandem.parallel.world import World
from tandem.training.algorithm import actor_loss, algorithm_of, critic_loss
from tandem.types import Experience, TokenBatch
from tests.models.alike_rows import GROUPS, grouped_batch
from tests.models.families import ragged_batch, tiny_model, tiny_scalar
from tests.ops.counting import on_meta

META = torch.device("meta")


class Transfers(NoWaiting):
    """Within: whatever waits for the meta device raises; tensors that went there are counted."""

    sent = 0

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if all(x.device.type == "cpu" for x in given):
            result = operation(*args, **(kwargs or {}))
            moved = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.sent += bool(given) and any(x.device == META for x in moved)
            return result
        return super().__torch_dispatch__(operation, types, args, kwargs)


def experience(batch: TokenBatch) -> Experience:
    shape = batch.token_ids.shape
    there = {name: torch.zeros(shape, device=META) for name in FIELDS}
    rows = torch.zeros(len(batch), device=META)
    return Experience(
        batch.to(META), scores=rows, group=torch.arange(len(batch)), rollout=cast(Any, None),
        metrics={}, **there,
    )  # fmt: skip


FIELDS = ("old_logprobs", "ref_logprobs", "rewards", "advantages", "values", "returns")


@pytest.mark.parametrize("groups", ["one", "ragged"])
@pytest.mark.parametrize("role", ["actor", "critic", "beside a teacher"])
def test_a_micro_batch_is_sent_in_one_transfer_and_read_in_none(
    role: str, groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_meta(monkeypatch)

    def plain(head: VocabularyHead, *_: Any) -> bool:
        head._is_plain = True
        return True

    monkeypatch.setattr(VocabularyHead, "_takes_apart", plain)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no such device
    model = cast(Any, tiny_scalar("llama") if role == "critic" else tiny_model("llama")).train()
    teacher = cast(Any, tiny_model("llama"))
    for placed in (model, teacher):
        nn.Module.to(placed, META)
    whole = experience(grouped_batch(GROUPS[groups]))
    algorithm = algorithm_of(PPOConfig(), 8)
    if role == "beside a teacher":
        algorithm = algorithm_of(GRPOConfig(kl="exact-in-loss", normalization="sequence"), 8)
    engine: Any = SimpleNamespace(
        actor=model,
        reference=teacher,
        has_reference=True,
        settings=SimpleNamespace(sampling=SimpleNamespace(temperature=1.0)),
        actor_logprobs=lambda batch, with_entropy, kept: response_logprobs(
            model, batch, with_entropy=with_entropy
        ),
        values=lambda batch: token_values(model, batch),
    )

    def learn(rows: Rows) -> MicroBatchLoss:
        part = whole.select(rows.host, rows.on(META))
        return (
            critic_loss(engine, algorithm, part)
            if role == "critic"
            else actor_loss(engine, algorithm, part, kl_coef=0.1)
        )

    class OnMeta:
        """A learner whose forward and backward alone count."""

        name, shards = role, SimpleNamespace(world=World())

        def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
            loss.backward()

    OnMeta.model = model  # type: ignore[attr-defined]
    monkeypatch.setattr(update, "_read", lambda numbers: [0.0] * len(numbers))
    rows = len(whole)
    term = LossTerm([10] * rows, 1.0, learn)
    _accumulated(cast(Any, OnMeta()), term, 20, is_last=True)  # what is found out once
    with Transfers() as transfers:
        _accumulated(cast(Any, OnMeta()), term, 20, is_last=True)
    # All rows' numbers of the update; for each micro-batch what its forward needs of them.
    forwards = 2 if role == "beside a teacher" else 1
    assert transfers.sent == 1 + forwards * -(-rows // 2)


def test_the_rows_of_micro_batches_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []

    def send(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
        assert device == META
        sent.extend(parts)
        return tuple(parts)

    monkeypatch.setattr(gpu, "sent_together", send)
    parts = [[4, 1], [], [0, 3, 2]]
    made = rows_together(parts)
    assert [list(rows) for rows in made] == parts
    assert [rows.host.tolist() for rows in made] == parts
    assert [rows.on(torch.device("cpu")).tolist() for rows in made] == parts
    assert not sent
    assert [rows.on(META).tolist() for rows in made] == parts
    assert [part.tolist() for part in sent] == [[4, 1, 0, 3, 2]]
    assert rows_together([]) == []


def test_a_batch_goes_to_a_device_in_one_transfer() -> None:
    batch = ragged_batch((5, 9, 3))
    with Transfers() as transfers:
        there = batch.to(META)
    assert transfers.sent == 1
    assert there.host is batch
    for name in ("token_ids", "attention_mask", "response_mask"):
        moved, own = getattr(there, name), getattr(batch, name)
        assert (moved.shape, moved.dtype) == (own.shape, own.dtype)
    assert batch.to("cpu") is batch


def test_what_comes_from_a_device_is_what_went(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged_batch((5, 9, 3))
    monkeypatch.setattr(types, "_sent", lambda numbers, device: numbers)
    moved = batch.to(META)
    assert torch.equal(moved.token_ids, batch.token_ids)
    assert torch.equal(moved.attention_mask, batch.attention_mask)
    assert torch.equal(moved.response_mask, batch.response_mask)


def test_what_is_sent_is_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared prompts on a device: the same places, tokens and targets as on the host."""
    batch = grouped_batch(GROUPS["ragged"])
    asked = batch.response_mask.roll(-1, 1)
    expected = packed_rows(batch, batch.attention_mask, asked, shares=True)
    sent: list[Tensor] = []

    def send(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
        assert device == META
        sent.extend(parts)
        return tuple(part.to(torch.int64) for part in parts)

    monkeypatch.setattr(gpu, "sent_together", send)
    rows = packed_rows(batch.to(META), batch.attention_mask, asked, shares=True)
    for name in ("token_ids", "positions", "asked"):
        assert torch.equal(getattr(rows, name), getattr(expected, name))
    step, same = rows.step, expected.step
    assert step.wanted is not None
    assert same.wanted is not None
    assert torch.equal(step.wanted.rows, same.wanted.rows)
    assert torch.equal(step.cu_seqlens, same.cu_seqlens)
    assert step.max_length == same.max_length
    assert torch.equal(step.whole().tokens, same.whole().tokens)
    assert torch.equal(step.whole().back, same.whole().back)
    assert torch.equal(step.whole().packed.cu_seqlens, same.whole().packed.cu_seqlens)
    mask = batch.response_mask
    device = SimpleNamespace(token_ids=batch.token_ids, response_mask=_Elsewhere(mask))
    found = response_tokens(cast(Any, device), int(mask.sum()))
    assert torch.equal(found, batch.token_ids[mask])


class _Elsewhere:
    """A mask that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def flatten(self) -> Tensor:
        return self._mask.flatten()


def test_numbers_are_read_together_and_as_they_are() -> None:
    numbers = [torch.tensor(0.1), torch.tensor(3), torch.tensor([0.3]), torch.tensor(7)]
    assert update._read(numbers) == [float(number) for number in numbers]


def test_rows_are_chosen_on_the_host_and_on_the_device_alike() -> None:
    batch = ragged_batch((5, 9, 3))
    there = batch.to(META)
    chosen = there.select(torch.tensor([2, 0]))
    own = batch.select(torch.tensor([2, 0]))
    assert chosen.token_ids.shape == own.token_ids.shape
    assert torch.equal(chosen.on_host().token_ids, own.token_ids)
    assert chosen.num_response_tokens == own.num_response_tokens
    assert chosen.to("cpu") is chosen.host
    states = predictor_states(tiny_model("llama"), own)
    assert len(states) == own.num_response_tokens
