import json
from pathlib import Path

import pytest
import yaml

from tandem import metrics
from tandem.config.stages import stage_of
from tandem.metrics.folder import read_folder
from tandem.metrics.metric import PHASES
from tandem.metrics.report import changed_knobs
from tandem.metrics.sections import (
    final_answers,
    result_cards,
    result_table,
    stage_curves,
    stages_of_run,
    time_per_phase,
    total_seconds,
)
from tests.jsonl import write_jsonl

from .runs import metrics_line


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
def test_the_best_value_is_marked_where_a_direction_is_good(tmp_path, name, numbers, best):
    models = {label: {name: n} for label, n in zip("abc", numbers, strict=True)}
    table = result_table(evaluated(tmp_path, models=models))
    assert table["labels"] == ["a", "b", "c"]
    assert table["rows"][0]["best"] == best


def test_a_model_without_the_metric_has_an_empty_cell(tmp_path):
    models = {"sft": {"heldout_reward": 0.5}, "reward": {"heldout_accuracy": 0.75}}
    rows = result_table(evaluated(tmp_path, models=models))["rows"]
    assert [(row["title"], row["cells"]) for row in rows] == [
        ("Held-out reward", ["0.5", ""]),
        ("Held-out accuracy", ["", "75.0 %"]),
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
    assert [(a["label"], a["score"], a["best"]) for a in view["answers"]] == [
        ("sft", "1", False),
        ("base", "", False),
        ("ppo", "nan", False),
        ("ema", "2", True),
    ]


def test_a_card_says_where_its_number_came_from(tmp_path):
    lines = [metrics_line("reward", n, heldout_accuracy=a) for n, a in ((0, 0.5), (9, "nan"))]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    (card,) = result_cards(read_folder(tmp_path))
    assert (card["value"], card["detail"]) == ("50.0 %", "at step 0")


def test_cards_name_the_model_and_where_it_started(tmp_path):
    lines = [
        metrics_line(stage, step, **{metric: value})
        for stage, metric, values in (
            ("sft", "heldout_perplexity", (98.5, 14.9)),
            ("reward", "heldout_accuracy", (0.5, 0.75)),
            ("ppo", "heldout_reward", (0.25, 1.5)),
        )
        for step, value in zip((0, 9), values, strict=True)
    ]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    assert [tuple(card.values()) for card in result_cards(read_folder(tmp_path))] == [
        ("SFT model: held-out perplexity", "14.9", "98.5 before training"),
        ("Reward model: held-out accuracy", "75.0 %", "50.0 % before training"),
        ("PPO model: held-out reward", "1.5", "0.25 before training"),
    ]


def test_stages_are_those_asked_for_then_those_that_ran(tmp_path):
    (tmp_path / "config.yaml").write_text("stages: [sft, ppo]")
    lines = [metrics_line("dpo", 1200, **{"seconds/step": 61.0}), metrics_line("sft", 2)]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    assert stages_of_run(read_folder(tmp_path)) == [
        ("sft", "2 steps"),
        ("ppo", ""),
        ("dpo", "1,200 steps · 1 m 01 s"),
    ]


def stage(path, *steps):
    write_jsonl(
        path / "metrics.jsonl",
        [metrics_line("ppo", n, **values) for n, values in enumerate(steps, start=1)],
    )
    return read_folder(path)


def test_rates_are_over_all_steps_not_a_mean_of_rates(tmp_path):
    rate = "tokens_per_second/generate"
    folder = stage(
        tmp_path,
        {"seconds/generate": 1.0, rate: 100.0, "peak_memory_bytes/generate": 2**30},
        {"seconds/generate": 3.0, rate: 500.0, "peak_memory_bytes/generate": 2**29},
    )
    (view,) = time_per_phase(folder)
    (row,) = view["rows"]
    assert row["cells"] == ["4.00 s", "100 %", "400", "", "", "1.00 GiB"]


def test_time_outside_of_phases_is_shown(tmp_path):
    folder = stage(tmp_path, {"seconds/step": 10.0, "seconds/train": 6.0, "seconds/save": 0.0})
    (view,) = time_per_phase(folder)
    assert [(row["phase"], row["cells"][1]) for row in view["rows"]] == [
        ("train", "60 %"),
        ("other", "40 %"),
    ]


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ({"seconds/step": 10.0, "seconds/train": 6.0}, 10.0),
        ({"seconds/step": 6.0, "seconds/train": 6.0, "seconds/evaluate": 3.0}, 9.0),
        ({"seconds/train": 6.0}, 6.0),
        ({"reward": 1.0}, 0.0),
        ({"seconds/step": "nan", "seconds/train": 2.0}, 2.0),
    ],
)
def test_the_time_of_a_stage_is_its_steps_or_its_phases(tmp_path, values, total):
    assert total_seconds(stage(tmp_path, values), stage_of("ppo")) == total


def test_a_phase_has_one_color_in_every_stage(tmp_path):
    write_jsonl(
        tmp_path / "metrics.jsonl",
        [
            metrics_line("sft", 1, **{"seconds/train": 1.0}),
            metrics_line("ppo", 1, **{"seconds/generate": 1.0, "seconds/train": 1.0}),
        ],
    )
    sft, ppo = time_per_phase(read_folder(tmp_path))
    colors = [{row["phase"]: row["color"] for row in v["rows"]}["train"] for v in (sft, ppo)]
    assert colors[0] == colors[1]
    assert 'class="f3"' in sft["bar"]


def test_every_phase_and_the_rest_have_a_color_in_the_style_sheet(tmp_path):
    parts = {f"seconds/{phase}": 1.0 for phase in PHASES if phase != "step"}
    (view,) = time_per_phase(stage(tmp_path, {"seconds/step": 10.0, **parts}))
    style = (Path(metrics.__file__).parent / "report.css").read_text()
    colors = [row["color"] for row in view["rows"]]
    assert len(set(colors)) == len(PHASES)
    for color in colors:
        assert f"--c{color}:" in style
        assert f".swatch.n{color} {{" in style
        assert f".f{color} {{" in style


def test_changed_knobs_have_todays_names():
    config = {"ppo": {"kl_target": 0.0, "target_kl": 0.2}}
    assert changed_knobs(config) == [("ppo.early_stop_kl", "0.2", "0.1")]


def test_changed_knobs_are_those_that_differ_from_the_defaults():
    config = yaml.safe_load(
        "actor_model: m\nseed: 1234\nsteps: [sft, reward, ppo]\ndata: [a, b]\n"
        "ppo: {ema: true, kl_coef: 0.05, actor: {learning_rate: 1.0e-6}}\nnew: {knob: 3}\n"
    )
    assert changed_knobs(config) == [
        ("actor_model", "m", "empty"),
        ("data", "a, b", "none"),
        ("ppo.ema", "true", "false"),
        ("new.knob", "3", "empty"),
    ]


def test_a_speed_is_the_median_of_the_steps_for_the_last_may_be_a_short_batch(tmp_path):
    speeds = (100.0, 104.0, 102.0, 30.0, "nan")
    lines = [
        metrics_line("sft", step, **{"tokens_per_second/train": speed})
        for step, speed in enumerate(speeds, start=1)
    ]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    ((stage,),) = [stage_curves(read_folder(tmp_path))]
    assert [figure["legend"] for figure in stage["figures"]] == [[(1, "train", "101")]]
    assert stage["steps"] == "5 steps"


def test_a_small_rate_of_computing_is_in_gflops(tmp_path):
    folder = stage(tmp_path, {"seconds/train": 2.0, "tflops/train": 0.0358})
    ((row,),) = [view["rows"] for view in time_per_phase(folder)]
    assert row["cells"][4] == "35.8 GFLOP/s"


def test_a_stage_draws_only_what_it_logged(tmp_path):
    """Charts belong to a family; a stage draws those of its lines that it logs."""
    lines = [
        metrics_line("reward", 1, margin=1.0, heldout_margin=2.0),
        metrics_line("dpo", 1, implicit_reward_margin=3.0, heldout_margin=2.5),
        metrics_line("dpo", 2, **{"tokens_per_second/train": 9.0, "seconds/train": 1.0}),
        metrics_line("ppo", 1, heldout_reward=4.0, kl="nan"),
    ]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    drawn = [
        {figure["title"]: figure["legend"] for figure in stage["figures"]}
        for stage in stage_curves(read_folder(tmp_path))
    ]
    assert drawn == [
        {"Margin": [(1, "training", "1"), (2, "held-out", "2")]},
        {
            "Margin": [(1, "training", "3"), (2, "held-out", "2.5")],
            "Speed": [(1, "train", "9")],
        },
        {"Reward before penalty and clipping": [(2, "held-out", "4")]},
    ]


def test_the_ends_of_conversations_are_told_apart(tmp_path):
    values = {"conversations_over": 0.3, "conversations_cut": 0.5, "environment_failed": 0.1}
    write_jsonl(tmp_path / "metrics.jsonl", [metrics_line("grpo", 1, **values)])
    ((stage,),) = [stage_curves(read_folder(tmp_path))]
    legends = {figure["title"]: figure["legend"] for figure in stage["figures"]}
    assert [label for _, label, _ in legends["Ends of conversations"]] == [
        "over",
        "by a limit",
        "by a failure",
    ]
