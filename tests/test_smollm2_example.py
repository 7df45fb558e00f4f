"""The SmolLM2 recipe's own arithmetic; the runs themselves are in docs/real_runs.md."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tandem.config.load import build_config, check_config
from tandem.data.embedded import build_tokenizer, model_config, rows
from tandem.errors import ConfigError
from tandem.models.load import new_causal_lm
from tandem.models.save import save_model
from tests.jsonl import write_jsonl

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2"
NAMES = ("arm", "collapse", "evaluate", "hh", "measure", "mismatch", "table", "tasks")


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The modules of the recipe, which import each other by their bare names."""
    from importlib import import_module

    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("task", ["sums", "gsm8k"])
@pytest.mark.parametrize("algorithm", ["sft", "ppo", "grpo", "rloo"])
def test_an_arm_is_a_valid_run_on_the_same_rollouts(
    example: dict[str, ModuleType], algorithm: str, task: str
) -> None:
    options = Namespace(
        seed=1,
        model="m",
        output=Path("runs/x"),
        save_every=10,
        dtype="fp32",
        learning_rate=0,
    )
    arm, tasks = example["arm"], example["tasks"]
    config = build_config(arm.knobs(algorithm, tasks.TASKS[task], options))
    check_config(config)
    section = config.ppo if algorithm == "ppo" else config.grpo
    if algorithm != "sft":
        assert (section.prompts_per_step, config.sampling.samples_per_prompt) == (16, 4)
        assert section.has_reference == (algorithm == "ppo")  # PPO always measures its KL


def test_every_arm_of_the_collapse_table_is_a_valid_run(example: dict[str, ModuleType]) -> None:
    collapse = example["collapse"]
    options = Namespace(
        seed=1,
        model="m",
        output=Path("runs/x"),
        data="embedded",
        reward="tandem:exact_number",
        steps=9,
        learning_rate=1e-5,
        dtype="bf16",
        kl_coef=0.05,
        minibatch_size=64,
        max_new_tokens=8,
    )
    for arm in collapse.ARMS:
        config = build_config(collapse.knobs(arm, options))
        check_config(config)
        section = config.ppo if arm.startswith("ppo") else config.grpo
        assert section.has_reference, arm


def test_the_budget_counts_over_sessions_and_stops_the_run(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        file = tmp_path / "budget.json"
        file.write_text(json.dumps({"cpu_seconds": 50.0}))
        budget = example["measure"].Budget(file, 50 / 60)
        budget.start()
        budget._thread.join(timeout=120)
        assert budget.end() > 50
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
    assert json.loads(file.read_text())["cpu_seconds"] > 50


def test_the_table_averages_seeds_and_says_how_sure_it_is(example: dict[str, ModuleType]) -> None:
    table = example["table"]
    record = {name: [0.25, 0.05] for name in table.COLUMNS}
    record |= {"task": "sums", "label": "sft", "tokens": 3.0, "arm": {}, "seed": 1}
    other = {**record, "seed": 2, "strict_pass1": [0.35, 0.05]}
    text = table.evaluations([record, other])
    assert "| sums | sft | - | - | 30.0 (5.0) | - | 25.0 (0.0) |" in text
    assert "25.0 (5.0)" in table.evaluations([record])
    before = {**record, "strict_by_prompt": [0.0, 0.25, 0.5]}
    after = {**record, "label": "grpo", "strict_by_prompt": [0.25, 0.5, 0.75]}
    assert "| sums | grpo | - | - | 25.0 (5.0) | 25.0 (0.0) |" in table.evaluations([before, after])


def test_lenient_rules(example: dict[str, ModuleType]) -> None:
    tasks = example["tasks"]
    assert tasks.same_number("The sum is 12.", "12") == 1
    assert tasks.same_number("none", "12") == 0
    assert tasks.same_word("Yes, no, yes!", "Yes") == 1
    assert tasks.same_word("maybe", "Yes") == 0
    assert tasks.after_hashes("so it is 7\n#### 7", "a\n#### 7") == 1
    assert tasks.after_hashes("7", "a\n#### 7") == 0


def test_hh_places_every_policy_on_the_plane_of_reward_and_kl(
    example: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer()
    config = model_config(tokenizer, hidden_size=32, num_layers=1)
    save_model(new_causal_lm(config, seed=0), tokenizer, tmp_path / "base")
    data = tmp_path / "pairs.jsonl"
    write_jsonl(data, rows(160))
    output = tmp_path / "hh"
    command = f"hh.py --model {tmp_path}/base --data {data} --output {output} --pairs 150"
    sizes = "--ppo-steps 1 --prompts 6 --best-of 4 --max-tokens 96 --max-new-tokens 8"
    monkeypatch.setattr(sys, "argv", [*command.split(), *sizes.split(), "--heldout", "0.3"])
    example["hh"].main()
    record = json.loads((output / "hh.json").read_text())
    assert record["prompts"] == 6
    assert record["reward_model"]["data"]["rows"] == 150
    assert set(record["policies"]) == {"sft", "ppo", "dpo"}
    kl, error = record["policies"]["sft"]["kl"]
    assert max(abs(kl), error) < 1e-3  # to itself
    frontier = record["best_of_n"]
    assert [point["n"] for point in frontier] == [1, 2, 4]
    assert frontier[0]["mean_reward"] == pytest.approx(
        record["policies"]["sft"]["reward"][0], abs=1e-3
    )
    example["hh"].main()  # a finished run is measured again
    again = json.loads((output / "hh.json").read_text())
    assert again["policies"] == record["policies"]


def test_a_users_mistake_is_one_line(
    example: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DATA", str(tmp_path))
    into = f"--into {tmp_path}/e.jsonl"
    for name, arguments, told in (
        ("evaluate", f"{tmp_path}/none --label a --task gsm8k {into}", "Set DATA to its folder"),
        ("mismatch", f"--model {tmp_path}/none {into}", "must be a folder with config.json"),
        ("hh", f"--model m --data {tmp_path}/none --output {tmp_path}/hh", "none: No such file"),
        ("table", "", "must be given"),
        ("table", f"--evaluations {tmp_path}/none", "none: no such file"),
    ):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            example["measure"].command(example[name].main)
        assert ended.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert told in line, line


def test_building_the_operations_is_not_part_of_the_budget(
    example: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, clock = example["measure"], [10.0]

    def build() -> bool:
        clock[0] += 80
        return True

    monkeypatch.setattr(measure, "cpu_seconds", lambda: clock[0])
    monkeypatch.setattr(measure, "available", build)
    budget = measure.Budget(tmp_path / "budget.json", 1)
    budget.start()
    assert budget.end() == 10


def test_a_mismatch_run_begins_again_unless_it_has_all_steps(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    has_all, file = example["mismatch"].has_all, tmp_path / "mismatch.jsonl"
    assert not has_all(file, {"run": "exact"}, 1)
    lines = [
        json.dumps({"run": run, "step": step})
        for run, steps in (("exact", 3), ("bf16-sampler", 2))
        for step in range(1, steps + 1)
    ]
    file.write_text("\n".join(lines) + "\n")
    assert has_all(file, {"run": "exact", "seed": 1}, 3)
    assert file.read_text().splitlines() == lines
    assert not has_all(file, {"run": "bf16-sampler", "seed": 1}, 3)
    assert file.read_text().splitlines() == lines[:3]


def test_collapse_arms_of_other_options_do_not_mix(example: dict[str, ModuleType]) -> None:
    check, done = example["collapse"].check_same, {"steps": 40, "seed": 1, "output": "a"}
    check(Path("f"), "grpo", done, {**done, "output": "b"})
    with pytest.raises(ConfigError, match="grpo has steps 40, not 300"):
        check(Path("f"), "grpo", done, {**done, "steps": 300})


def test_the_mismatch_table_keeps_kinds_of_runs_apart(example: dict[str, ModuleType]) -> None:
    record = {"run": "exact", "mean_gap": 0.0, "max_gap": 0.0, "reward": 0.5, "seed": 1}
    both = [{**record, "dtype": "fp32"}, {**record, "dtype": "bf16"}]
    text = example["table"].mismatch(both)
    assert "| exact, dtype fp32 | 1 |" in text
    assert "| exact, dtype bf16 | 1 |" in text
    assert "| exact | 2 |" in example["table"].mismatch(both[:1] * 2)


def test_an_empty_picture_replaces_none(
    example: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from importlib import import_module

    pictures = import_module("pictures")
    docs, runs = tmp_path / "docs", tmp_path / "runs"
    docs.mkdir()
    runs.mkdir()
    for name in ("evaluations", "mismatch"):
        (runs / f"{name}.jsonl").write_text("")
    for name in ("accuracy", "training", "mismatch"):
        (docs / f"{name}.png").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--runs", str(runs), "--into", str(docs)])
    pictures.main()
    assert {file.read_text() for file in docs.iterdir()} == {"kept"}


def test_a_finished_arm_is_neither_charged_again_nor_taken_for_another(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    arm, file = example["arm"], tmp_path / "budget.json"
    file.write_text(json.dumps({"cpu_seconds": 61.5}))
    assert arm.run({}, example["measure"].Budget(file, 1)) == 61.5
    assert json.loads(file.read_text()) == {"cpu_seconds": 61.5}
    config = {"seed": 1, "data": ["a"], "save_every": 10}
    arm.check_same(tmp_path / "arm.json", config)
    (tmp_path / "arm.json").write_text(json.dumps({"config": config}))
    arm.check_same(tmp_path / "arm.json", {**config, "save_every": 5})
    with pytest.raises(ConfigError, match="another data"):
        arm.check_same(tmp_path / "arm.json", {**config, "data": ["b"]})
