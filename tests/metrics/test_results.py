import json

import pytest

from tandem.metrics.folder import read_folder
from tandem.metrics.results import final_answers, result_cards, result_table, steps_of_run

from .runs import metrics_line, write_lines


def evaluated(path, **evaluation):
    (path / "evaluation.json").write_text(json.dumps(evaluation))
    return read_folder(path)


@pytest.mark.parametrize(
    ("name", "numbers", "best"),
    [
        ("heldout_reward", [0.1, 1.5, 1.5], {1, 2}),
        ("heldout_perplexity", [9.0, 8.0, "nan"], {1}),
        ("heldout_reward", [1.0, 1.0, 1.0], set()),
        ("heldout_reward", ["nan", None, 2.0], set()),
        ("heldout_kl", [1.0, 2.0, 3.0], set()),
        ("a name of another version", [1.0, 2.0, 3.0], set()),
    ],
)
def test_the_best_are_marked_where_one_way_is_better(tmp_path, name, numbers, best):
    models = {label: {name: n} for label, n in zip("abc", numbers, strict=True)}
    table = result_table(evaluated(tmp_path, models=models))
    assert table.labels == ("a", "b", "c")
    assert table.rows[0].best == best


def test_a_model_without_the_metric_has_an_empty_cell(tmp_path):
    models = {"sft": {"heldout_reward": 0.5}, "reward": {"heldout_accuracy": 0.75}}
    rows = result_table(evaluated(tmp_path, models=models)).rows
    assert [(r.name, r.cells) for r in rows] == [
        ("heldout_reward", ("0.5", "")),
        ("heldout_accuracy", ("", "75.0 %")),
    ]


def test_answers_keep_their_order_and_an_unscored_one_has_no_score(tmp_path):
    answers = {
        "sft": {"text": "a", "score": 1.0},
        "base": {"text": "", "score": None},
        "ppo": {"text": "c", "score": "nan"},
        "ema": {"text": "d", "score": 2.0},
    }
    folder = evaluated(tmp_path, answers=[{"prompt": "p", "answers": answers}])
    (view,) = final_answers(folder)
    assert [(a.label, a.score, a.best) for a in view.answers] == [
        ("sft", "1", False),
        ("base", "", False),
        ("ppo", "nan", False),
        ("ema", "2", True),
    ]


def test_a_card_says_where_its_number_came_from(tmp_path):
    lines = [metrics_line("reward", n, heldout_accuracy=a) for n, a in ((0, 0.5), (9, "nan"))]
    write_lines(tmp_path / "metrics.jsonl", lines)
    (card,) = result_cards(read_folder(tmp_path))
    assert (card.value, card.detail) == ("50.0 %", "at step 0")


def test_cards_name_the_model_they_measure_and_the_one_it_started_from(tmp_path):
    lines = [
        metrics_line(stage, step, **{metric: value})
        for stage, metric, values in (
            ("sft", "heldout_perplexity", (98.5, 14.9)),
            ("reward", "heldout_accuracy", (0.5, 0.75)),
            ("ppo", "heldout_reward", (0.25, 1.5)),
        )
        for step, value in zip((0, 9), values, strict=True)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    assert [
        (card.label, card.value, card.detail) for card in result_cards(read_folder(tmp_path))
    ] == [
        ("SFT model: perplexity, held-out", "14.9", "from 98.5 (base model)"),
        ("Reward model: accuracy, held-out", "75.0 %", "from 50.0 % (untrained)"),
        ("PPO model: reward, held-out, normalized", "1.5", "from 0.25 (SFT model)"),
    ]
    write_lines(tmp_path / "metrics.jsonl", lines[-2:])
    (alone,) = result_cards(read_folder(tmp_path))
    assert alone.detail == "from 0.25 (at the start)"


def test_steps_are_those_asked_for_then_those_that_ran(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: [sft, ppo]")
    lines = [metrics_line("dpo", 1200, **{"seconds/step": 61.0}), metrics_line("sft", 2)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    assert steps_of_run(read_folder(tmp_path)) == [
        ("sft", "2 steps"),
        ("ppo", ""),
        ("dpo", "1,200 steps · 1 m 01 s"),
    ]
