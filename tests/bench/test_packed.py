"""The packing bench: both sides differentiate the same loss, and it refuses where they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import packed
from bench.harness import Cost
from bench.packed import PackedWork, Sides
from bench.ragged import EOS, PAD, SHAPES, apart, ragged_rows
from bench.training_table import summary

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture
def work() -> PackedWork:
    return PackedWork(shape=TINY, num_rows=9, prompt_tokens=(2, 6), max_answer_tokens=12)


def test_rows_are_prompts_then_answers_of_geometric_lengths() -> None:
    rows = ragged_rows(2000, 48, prompt_tokens=(3, 5), max_answer_tokens=16)
    answers = torch.tensor([float(sum(row.response_mask)) for row in rows])
    prompts = {len(row) - sum(row.response_mask) for row in rows}
    assert prompts == {3, 4, 5}
    assert (answers.min(), answers.max()) == (1, 16)
    assert abs(answers.mean() - 8) < 4 * answers.std() / 2000**0.5 + 0.15  # 1.594 is rounded
    left = [(answers > n).float().mean().item() for n in (0, 5, 10)]
    assert left[1] / left[0] == pytest.approx(left[2] / left[1], abs=0.08)
    for row in rows:
        prompt = len(row) - sum(row.response_mask)
        assert list(row.response_mask) == [i >= prompt for i in range(len(row))]
        assert row.token_ids[-1] == EOS
        assert not {PAD, EOS} & set(row.token_ids[:-1])
    assert ragged_rows(3, 48) == ragged_rows(3, 48)
    assert ragged_rows(3, 48) != ragged_rows(3, 48, seed=2)


def test_apart_is_the_difference_over_the_size() -> None:
    ours, theirs = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])], [torch.tensor([3.0, 0.0])]
    assert apart(ours, [*theirs, torch.tensor([4.0])]) == 0
    assert apart([torch.tensor([3.0, 5.0])], [torch.tensor([3.0, 4.0])]) == pytest.approx(0.2)


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
def test_both_sides_have_one_gradient_whatever_the_micro_batch(
    work: PackedWork, micro_batch_tokens: int
) -> None:
    sides = Sides(work)
    assert sides.gradients_apart(micro_batch_tokens) < 1e-5
    whole = [p.grad.clone() for p in sides.plain.parameters() if p.grad is not None]
    sides.run_plain(20)
    again = [p.grad for p in sides.plain.parameters() if p.grad is not None]
    assert apart(again, whole) < 1e-5


def test_the_gradient_is_of_the_answers_mean_cross_entropy(work: PackedWork) -> None:
    """Against a loop over rows and tokens, one row at a time and without padding."""
    sides = Sides(work)
    sides.run_plain(40)
    ours = [p.grad.clone() for p in sides.plain.parameters() if p.grad is not None]
    sides.plain.zero_grad()
    total: Tensor = torch.zeros(())
    count = 0
    for row in sides.rows:
        logits = sides.plain(torch.tensor([row.token_ids])).logits[0]
        for t in range(1, len(row)):
            if row.response_mask[t]:
                total = total - logits[t - 1].log_softmax(dim=0)[row.token_ids[t]]
                count += 1
    (total / count).backward()  # type: ignore[no-untyped-call]
    slow = [p.grad for p in sides.plain.parameters() if p.grad is not None]
    assert apart(ours, slow) < 1e-5


def test_another_gradient_is_refused(work: PackedWork) -> None:
    sides = Sides(work)
    sides.denominator += 1
    run = sides.run_tandem

    def with_another_denominator(micro_batch_tokens: int) -> dict[str, Cost]:
        costs = run(micro_batch_tokens)
        sides.denominator -= 1
        return costs

    sides.run_tandem = with_another_denominator  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="gradients must agree to 1e-05 on both sides; got 0"):
        sides.gradients_apart(40)


def test_the_padded_side_gets_its_fastest_micro_batch(
    work: PackedWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = Sides(work)
    seconds = {10: 3.0, 20: 1.0, 40: 2.0}
    monkeypatch.setattr(sides, "run_plain", lambda n: {"total": Cost(0.0, seconds[n])})
    assert sides.fastest((10, 20, 40)) == 20


def test_what_is_measured_is_what_is_reported(work: PackedWork) -> None:
    row = packed.measure(replace(work, num_rows=4), rounds=2, micro_batch_tokens=30)
    lengths = [len(r) for r in Sides(replace(work, num_rows=4)).rows]
    assert row["tokens"] == sum(lengths)
    assert {side: len(rounds) for side, rounds in row["rounds"].items()} == {"tandem": 2, "hf": 2}
    size = 30 // max(lengths)
    padded = sum(len(lengths[i : i + size]) * max(lengths[i : i + size]) for i in range(0, 4, size))
    assert row["padding"] == pytest.approx(padded / sum(lengths))


def test_rates_and_ratios_by_hand() -> None:
    costs = {
        "tandem": [{"total": Cost(1.0, 2.0)}, {"total": Cost(2.0, 2.0)}],
        "hf": [{"total": Cost(4.0, 2.0)}, {"total": Cost(4.0, 8.0)}],
    }
    table = summary(60, costs)
    assert table["tandem"]["tokens_per_wall_second"] == 40
    assert table["hf"]["cpu_seconds"] == 5
    assert table["hf"]["wall_ratio"] == {"median": 3, "least": 2, "most": 4}
    assert table["hf"]["cpu_ratio"] == {"median": 2.5, "least": 1, "most": 4}


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "llama-2.2m", TINY)  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    file = tmp_path / "packed.json"
    command = ["--shapes", "llama-2.2m", "--sequences", "4", "--rounds", "1", "--json", str(file)]
    try:
        packed.main(command)
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("tandem", "hf", "tokens/s", "ratio", "padding"))
    written: dict[str, Any] = json.loads(file.read_text("utf-8"))
    row = written["rows"]["llama-2.2m"]
    assert row["work"]["num_rows"] == 4
    assert row["apart"]["gradients"] < 1e-5
    assert row["micro_batch_tokens"] in packed.MICRO_BATCH_TOKENS
    assert {"command", "commit", "machine", "threads", "keeps_freed_memory"} <= written.keys()
