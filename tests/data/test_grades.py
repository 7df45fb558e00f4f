"""Graded answers: how they are read, ranked, placed, imitated or not, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.config.dataset import DataConfig
from tandem.config.load import build_config, check_config
from tandem.data.assign import Dataset
from tandem.data.check_command import data_command
from tandem.data.dataset import load_data, load_text
from tandem.data.grades import number_of, rank
from tandem.data.reading.sources import parse_spec
from tandem.data.rows import RowProblem
from tandem.data.shapes.shaping import to_sample
from tandem.data.tools import bare
from tandem.errors import ConfigError
from tandem.types import Answer, Message, Sample, Source
from tests.jsonl import write_jsonl

HERE = Source("set", "set.jsonl", 1)


def loaded(path: str, stages: Sequence[str], **more: Any) -> Dataset:
    config = {"heldout": 0.0, **more.pop("config", {})}
    dataset = load_data(DataConfig(**config), [path], seed=1, stages=stages, **more)
    assert all(account.balances() for account in dataset.ledger.datasets.values())
    return dataset


def unused(dataset: Dataset) -> dict[str, int]:
    (account,) = dataset.ledger.datasets.values()
    return dict(account.unused)


def notes(dataset: Dataset) -> dict[str, int]:
    (account,) = dataset.ledger.datasets.values()
    return dict(account.notes)


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (-0.5, -0.5), ("4.5", 4.5), (" 2 ", 2.0), (True, 1.0), (False, 0.0), ("4/5", None),
     ("", None), (None, None), ([3], None), ("nan", None), (float("inf"), None), (10**400, None)],
)  # fmt: skip
def test_what_is_a_grade(value: object, number: float | None) -> None:
    assert number_of(value) == number


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "Q?", "completion": "a", "grade": 2}, "grade"),
        ({"prompt": "Q?", "response": "a", "helpfulness": 2, "coherence": 4}, "helpfulness"),
        ({"instruction": "Q?", "input": "", "output": "a", "rating": "2"}, "rating"),
        ({"question": "Q?", "answer": "a", "stars": 2.0}, "stars"),
        ({"messages": [{"role": "user", "content": "Q?"},
                       {"role": "assistant", "content": "a"}], "score": 2}, "score"),
        ({"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "a"}],
          "overall_score": 2}, "overall_score"),
        ({"prompt": "Q?", "completion": "a", "grade": 2, "score": 9}, "grade"),
    ],
)  # fmt: skip
def test_a_number_beside_an_answer_is_its_grade_and_stays_a_column(
    row: dict[str, Any], column: str
) -> None:
    shaped = to_sample(row, HERE)
    assert (shaped.sample.grade, shaped.sample.chosen, shaped.grade_column) == (2.0, "a", column)
    assert shaped.sample.columns[column] == row[column]
    assert ("grade=" in shaped.shape) == (column != "grade")


def test_what_is_no_grade() -> None:
    answer = {"prompt": "Q?", "completion": "a"}
    both = to_sample({**answer, "score": 1, "rating": 2}, HERE)
    assert both.sample.grade is None
    assert "score and rating may each be the grade, so none is: map one to grade" in both.notes
    words = to_sample({**answer, "score": "A+"}, HERE)
    assert words.sample.grade is None
    assert "with a score that is no finite number, not read as a grade" in words.notes
    # A prompt, a text, a pair, and what a column map does not name.
    for row in ({"prompt": "Q?", "score": 1}, {"text": "Once.", "score": 1},
                {"prompt": "Q?", "chosen": "a", "rejected": "b", "score": 1}):  # fmt: skip
        shaped = to_sample(row, HERE)
        assert (shaped.sample.grade, shaped.notes) == (None, ())
    columns = {"prompt": "q", "completion": "a"}
    row = {"q": "Q?", "a": "a", "score": 1, "mark": 3}
    assert to_sample(row, HERE, columns).sample.grade is None
    assert to_sample(row, HERE, {**columns, "grade": "mark"}).sample.grade == 3.0
    assert parse_spec("f.jsonl::grade=mark").columns == {"grade": "mark"}
    with pytest.raises(RowProblem) as problem:
        to_sample({**row, "mark": "good"}, HERE, {**columns, "grade": "mark"})
    assert (problem.value.field, problem.value.expected) == ("mark", "be a finite number")


def graded(
    answer: str, grade: float, line: int, *, prompt: str = "Q?", data: str = "set"
) -> Sample:
    source = Source(data, f"{data}.jsonl", line)
    return Sample(source, (Message("user", prompt),), answer, grade=grade)


def test_answers_to_one_prompt_are_ranked_with_ties_and_repeats() -> None:
    samples = [
        graded("good", 4, 1), graded("bad", 1, 2), graded("other", 9, 3, prompt="R?"),
        graded("also good", 4, 4), graded(" bad ", 3, 5), graded("worst", 0, 6),
        graded("even", 2, 7, prompt="S?"), graded("even too", 2, 8, prompt="S?"),
        graded("good", 4, 9, data="another"),
    ]  # fmt: skip
    made = rank(dict(enumerate(samples)))
    assert list(made.rankings) == [0]
    ranking = made.rankings[0]
    assert ranking.ranking == ((1, "good"), (1, "also good"), (2, "bad"), (3, "worst"))
    assert ranking.grades == (4, 4, 2, 0)  # bad: the mean of 1 and 3
    assert (ranking.chosen, ranking.rejected) == ("good", "worst")
    assert [[source.line for source in rows] for rows in ranking.rows] == [[1], [4], [2, 5], [6]]
    assert (made.pairs["set"], made.ties["set"], made.again["set"]) == (5, 1, 1)
    assert set(made.left) == {2, 6, 7, 8}
    assert "no other answer" in made.left[2]
    assert "no other answer" in made.left[8]  # data sets are not compared
    assert "the same grade" in made.left[6]


SCORED = [
    {"prompt": f"Question {i}?", "completion": f"answer {k}", "score": k}
    for i in range(6)
    for k in range(4)
]


def test_pairs_of_graded_answers_are_one_row_of_several_and_every_row_is_counted(
    tmp_path: Path,
) -> None:
    alone = {"prompt": "Alone?", "completion": "a", "score": 2}
    tied = [{"prompt": "Tied?", "completion": c, "score": 1} for c in ("a", "b")]
    path = write_jsonl(tmp_path / "a.jsonl", [*SCORED, alone, *tied])
    for stage in ("reward", "dpo"):
        dataset = loaded(path, [stage])
        assert dataset.grades == "pairs"
        assert len(dataset.pairs) == 6
        assert dataset.ledger.datasets["a"].used["pairs"] == 24
        assert sorted(unused(dataset).values()) == [1, 2]
        assert notes(dataset)["pairs of graded answers to one prompt"] == 36
    assert len(loaded(f"{path}:2", ["reward"]).pairs) == 12
    half = loaded(f"{path}:0.5", ["reward"])
    assert 0 < len(half.pairs) < 6
    assert half.ledger.datasets["a"].used["pairs"] == 4 * len(half.pairs)


def test_how_grades_are_learned_follows_from_the_data_unless_it_is_said(tmp_path: Path) -> None:
    single = [row for row in SCORED if row["score"] == int(row["prompt"][9]) % 3]
    path = write_jsonl(tmp_path / "single.jsonl", single)
    dataset = loaded(path, ["reward"])
    assert (dataset.grades, len(dataset.pairs)) == ("regression", 6)
    assert [sample.grade for sample in dataset.pairs] == [0, 1, 2, 0, 1, 2]
    assert all(s.rejected is None and s.chosen is not None for s in dataset.pairs)
    forced = loaded(path, ["reward"], grades="pairs")
    assert (forced.pairs, sum(unused(forced).values())) == ([], 6)
    assert loaded(path, ["dpo"]).pairs == []  # other stages know pairs alone
    pair = {"prompt": "Pair?", "chosen": "a", "rejected": "b"}
    both = write_jsonl(tmp_path / "both.jsonl", [*single, pair])
    assert [sample.chosen for sample in loaded(both, ["reward"]).pairs] == ["a"]
    mixed = loaded(both, ["reward"], grades="regression")
    assert (len(mixed.pairs), sum(unused(mixed).values())) == (7, 0)
    whole = loaded(write_jsonl(tmp_path / "w.jsonl", SCORED), ["reward"], grades="regression")
    assert len(whole.pairs) == 24


def test_a_label_is_a_grade_for_the_reward_model_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{i}?", "completion": "a", "label": i % 2 == 0} for i in range(6)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    reward = loaded(path, ["reward"])
    assert [sample.grade for sample in reward.pairs] == [1, 0] * 3
    assert all(sample.chosen == "a" for sample in reward.pairs)
    kto = loaded(path, ["kto"])
    assert [(s.grade, s.label) for s in kto.pairs] == [(None, True), (None, False)] * 3
    assert any("labelled bad" in reason for reason in unused(loaded(path, ["dpo"])))
    twice = [{"prompt": "Q?", "completion": c, "label": c == "a"} for c in ("a", "b")]
    (sample,) = loaded(write_jsonl(tmp_path / "b.jsonl", twice), ["reward"]).pairs
    assert (sample.chosen, sample.rejected, sample.grades) == ("a", "b", (1.0, 0.0))


def test_low_grades_are_not_imitated_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", SCORED)
    alone = loaded(path, ["sft"])
    assert len(alone.texts) == 24
    (account,) = alone.ledger.datasets.values()
    assert account.notes["imitated whatever its grade (column score)"] == 24
    both = loaded(path, ["sft", "reward"], config={"split": (1.0, 0.0, 0.0)})
    assert {sample.grade for sample in both.texts} == {2, 3}, "beside a model of the grades"
    sft = loaded(path, ["sft"], config={"min_grade": "mean"})
    assert {sample.grade for sample in sft.texts} == {2, 3}
    assert unused(sft) == {
        "answer graded below 1.5 (the mean) (column score), in the share of texts": 12
    }
    top = loaded(path, ["sft"], config={"min_grade": "3"})
    assert {sample.grade for sample in top.texts} == {3}
    assert "answer graded below 3 (column score), in the share of texts" in unused(top)
    assert len(loaded(path, ["sft"], config={"min_grade": "none"}).texts) == 24
    text = load_text([path], DataConfig(heldout=0.0), seed=1, scores=True)
    assert {sample.grade for sample in text.train} == {2, 3}
    assert len(load_text([path], DataConfig(heldout=0.0), seed=1).train) == 24
    same = [{"prompt": f"Q{i}?", "completion": "a", "score": 0.1} for i in range(10)]
    equal = loaded(
        write_jsonl(tmp_path / "same.jsonl", same), ["sft"], config={"min_grade": "mean"}
    )
    assert len(equal.texts) == 10
    assert len(loaded(path, ["ppo"]).prompts) == 24  # a prompt may have any answer


def test_held_out_answers_of_low_grades_are_no_texts_and_keep_their_grades(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", SCORED)
    config = DataConfig(heldout=0.9)
    heldout = load_data(config, [path], seed=1, stages=["reward"]).heldout
    assert {s.grade for s in heldout if s.chosen is not None} == {2, 3}
    assert {s.grade for s in heldout if s.rejected is not None} == {0, 1}


def test_the_lowest_imitated_grade_is_a_number_or_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset.min_grade must be a number, mean, none or auto"
    ):
        check_config(build_config({"dataset": {"min_grade": "best"}}))
    with pytest.raises(ConfigError, match=r"reward.grade_margin must be 0 with reward.grades regr"):
        check_config(build_config({"reward": {"grades": "regression", "grade_margin": 1.0}}))
    path = write_jsonl(tmp_path / "a.jsonl", SCORED)
    with pytest.raises(ConfigError, match="--grades must be one of auto, pairs, regression; got"):
        data_command(["check", path, "--grades", "pair"])
    assert data_command(["check", path, "--stages", "reward", "--rows", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Grades of a (column score): 24 answers from 0 to 3, mean 1.5, sd 1.118." in out
    assert "The reward model would learn them as pairs of one prompt's answers; --grades" in out
    assert "a was read as: completion with grade=score (24)" in out
    assert "grade: 0" in out


def test_one_column_of_grades_per_data_set(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{i // 2}?", "completion": f"a{i}", "score": 80 + i % 5} for i in range(8)]
    rows += [{"prompt": f"Q{i // 2}?", "completion": f"b{i}", "rating": i % 5} for i in range(8)]
    found = loaded(write_jsonl(tmp_path / "mixed.jsonl", rows), ["reward"])
    assert min(grade for sample in found.pairs for grade in sample.grades) >= 80
    (account,) = found.ledger.datasets.values()
    told = "graded in column rating, and rows before in score: not read as a grade"
    assert account.notes[told] == 8


def test_many_answers_to_one_prompt_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Essays on one question, say: with each other it would take minutes for ten thousand."""
    asked: list[Answer] = []

    def counted(answer: Answer) -> Answer:
        asked.append(answer)
        return bare(answer)

    monkeypatch.setattr("tandem.data.grades.bare", counted)
    prompt = (Message("user", "Write an essay."),)
    samples = {
        i: Sample(Source("a", "a.jsonl", i), prompt, f"{i // 2} ", grade=float(i // 4))
        for i in range(40)
    }
    (ranking,) = rank(samples).rankings.values()
    assert len(asked) <= len(samples)
    assert [len(rows) for rows in ranking.rows] == [2] * 20
    assert ranking.ranking[:3] == ((1, "18 "), (1, "19 "), (2, "16 "))


def test_a_fingerprint_has_the_grades_that_the_run_depends_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{i}?", "completion": "a", "score": i} for i in range(6)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    def fingerprint(*stages: str, min_grade: str = "auto") -> str:
        found = loaded(path, list(stages), config={"min_grade": min_grade})
        (account,) = found.ledger.datasets.values()
        return account.fingerprint

    plain = fingerprint("sft")  # as before grades were read
    assert plain == fingerprint("ppo") == fingerprint("sft", min_grade="none")
    depending = fingerprint("sft", min_grade="mean")
    assert depending != plain
    assert depending == fingerprint("reward") == fingerprint("dpo") == fingerprint("sft", "reward")


def test_grades_beside_other_shapes_and_beyond_all_sizes(tmp_path: Path) -> None:
    rows = [{"prompt": "Q?", "chosen": f"a{i}", "score": i} for i in range(3)]
    (sample,) = loaded(write_jsonl(tmp_path / "a.jsonl", rows), ["reward"]).pairs
    assert sample.grades == (2.0, 1.0, 0.0)
    pair = [{"prompt": "Q?", "chosen": "a", "rejected": "b", "grade": 3}]
    found = loaded(write_jsonl(tmp_path / "b.jsonl", pair), ["reward"])
    (account,) = found.ledger.datasets.values()
    assert account.notes["with a grade beside two answers, not read"] == 1
    huge = [{"prompt": "Q?", "completion": f"a{i}", "grade": 10.0 ** (300 + i)} for i in range(3)]
    found = loaded(write_jsonl(tmp_path / "c.jsonl", huge), ["reward"])
    (account,) = found.ledger.datasets.values()
    assert account.notes["with a grade that is no finite number, not read as a grade"] == 3
