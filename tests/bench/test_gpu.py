"""The GPU's bench, tried on a CPU with tiny shapes: it runs, resumes, and what fails is named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_parts, gpu_tables
from bench.generation_sides import GenerationWork
from bench.gpu_parts import LARGEST, largest_work
from bench.models import SHAPES, model_config, random_model

TRY = ["--tiny", "--device", "cpu", "--rounds", "1", "--batch", "2", "--pairs", "2"]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child imports torch anew, which takes longer than all the rest."""
    monkeypatch.setattr(gpu, "in_child", lambda function, *arguments: function(*arguments))


def test_two_parts_run_and_become_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.json"
    gpu.main([*TRY, "--parts", "bf", "--json", str(file)])
    written = json.loads(file.read_text("utf-8"))
    assert {"command", "commit", "machine", "versions"} <= written.keys()
    for name in ("llama-7b", "opt-1.3b"):
        of = written["parts"]["B"][f"{name}, batch 2"]
        assert of["summary"]["tandem"]["tokens_per_wall_second"] > 0
    for name, rows in written["parts"]["F"].items():
        assert rows[-1]["name"] == "all", name
        assert sum(row["share"] for row in rows[:-1]) <= 1.0001
    capsys.readouterr()
    gpu_tables.main([str(file)])
    shown = capsys.readouterr().out
    assert "Tiny shapes" in shown
    assert "| llama-7b, batch 2 |" in shown
    assert "| operation | calls |" in shown


def test_the_other_parts_run_and_become_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but tests/gpu itself, which the other tests run: on a CPU it is its dry run."""
    asked, others = [], subprocess.run

    def ran(command: list[str], **how: Any) -> Any:
        if "pytest" not in command:
            return others(command, **how)
        asked.append((command[1:4], how["env"]["TANDEM_TEST_GPU"], how["timeout"]))
        return subprocess.CompletedProcess(command, 1, "FAILED a::b\n1 failed, 2 passed\n", "")

    monkeypatch.setattr(gpu_parts.subprocess, "run", ran)
    file = tmp_path / "made.json"
    parts = gpu.main([*TRY, "--parts", "acde", "--json", str(file)])["parts"]
    assert asked == [(["-m", "pytest", "tests/gpu"], "dry", 360.0)]
    failed = {n: row for rows in parts.values() for n, row in rows.items() if "failed" in row}
    assert not failed
    assert parts["A"]["tests"]["summary"] == ["FAILED a::b", "1 failed, 2 passed"]
    assert len(parts["A"]["rollouts in a row"]) == 3
    assert parts["C"]["tandem"]["switch"]["seconds"] > 0
    assert max(abs(apart) for apart in parts["C"]["agreement"].values()) < 1e-3
    assert len(parts["D"]) == 4
    assert all(row["actor_parameters"] > 0 for row in parts["E"].values())
    capsys.readouterr()
    gpu_tables.main([str(file)])
    shown = capsys.readouterr().out
    for title in ("A. First look", "C. PPO step", "D. Beside Hugging Face", "E. Largest"):
        assert f"**{title}" in shown
    assert "| 34b LoRA on NF4 |" in shown


def test_what_was_measured_before_a_kill_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is whole after every row, also if the bench dies inside the next."""
    file = tmp_path / "made.json"

    def killed(device: str) -> Any:
        raise KeyboardInterrupt

    quick = {"gpu_tests": lambda *_: {"passed": True, "summary": ["1 passed"], "seconds": 1.0}}
    quick |= {"attention_rates": lambda _: {"a": 1.0}, "rollouts": lambda *_: [{"seconds": 1.0}]}
    for name, function in quick.items():
        monkeypatch.setattr(gpu_parts, name, function)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_parts, "row_invariance", killed)
        with pytest.raises(KeyboardInterrupt):
            gpu.main([*TRY, "--parts", "A", "--json", str(file)])
    half = json.loads(file.read_text("utf-8"))["parts"]["A"]
    assert list(half) == ["tests", "attention, TB/s", "numbers that other rows change"]
    assert half["numbers that other rows change"] == {"failed": "the bench was stopped in it"}
    monkeypatch.setattr(gpu_parts, "gpu_tests", killed)
    began: list[str] = []
    for name, result in {"row_invariance": {1: 0.0}, "rollouts": [{"seconds": 1.0}]}.items():
        monkeypatch.setattr(
            gpu_parts, name, lambda *_, name=name, result=result: began.append(name) or result
        )
    rows = gpu.main([*TRY, "--parts", "A", "--json", str(file)])["parts"]["A"]
    assert list(rows) == [*half, "rollouts in a row"]
    assert began == ["rollouts", "row_invariance"], "what may kill the bench again comes last"
    assert not any("failed" in row for row in rows.values())


@pytest.mark.parametrize(
    ("code", "out", "err", "said"),
    [
        (1, "", "No module named pytest", "did not run (1): No module named pytest"),
        (5, "no tests ran in 2.14s", "", "did not run (5): no tests ran in 2.14s"),
        (2, "", "", "did not run (2): nothing was said"),
    ],
)
def test_gpu_tests_that_did_not_run_are_run_again(
    code: int, out: str, err: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(gpu_parts.subprocess, "run", lambda *_, **__: done)
    assert gpu_parts.gpu_tests("cpu", 1.0) == {"failed": f"tests/gpu {said}"}


def test_a_second_call_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, asked = tmp_path / "made.json", []

    def measure(work: GenerationWork, sides: Any, *_: Any) -> Any:
        asked.append(sides)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        rate = {"tokens_per_wall_second": 7.0, "share_of_limit": 0.5}
        return {"work": work, "summary": {"tandem": rate}, "absent": {}}

    monkeypatch.setattr(gpu, "measure_row", measure)
    first = gpu.main([*TRY, "--parts", "B", "--json", str(file)])["parts"]["B"]
    assert first["llama-7b, batch 2"] == {"failed": "OutOfMemoryError: CUDA out of memory"}
    assert "| llama-7b, batch 2 | OutOfMemoryError: CUDA out of memory |" in next(
        gpu_tables.tables({"B": json.loads(file.read_text("utf-8"))["parts"]["B"]})
    )
    again = gpu.main([*TRY, "--parts", "B", "--json", str(file)])["parts"]["B"]
    assert again["llama-7b, batch 2"]["summary"]["tandem"]["tokens_per_wall_second"] == 7.0
    assert len(asked) == 3, "what was measured stays"
    gpu.main([*TRY, "--parts", "B", "--json", str(file), "--again", "--minutes", "0"])
    late = json.loads(file.read_text("utf-8"))["parts"]["B"]["opt-1.3b, batch 2"]
    assert late == {"failed": "not begun within 0 minutes"}
    assert len(asked) == 3


def test_a_process_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def died(*arguments: Any) -> Any:
        raise RuntimeError("the process died")

    monkeypatch.setattr(gpu, "in_child", died)
    parts = gpu.main([*TRY, "--parts", "ACDE"])["parts"]
    for letter in "ACDE":
        assert set(map(str, parts[letter].values())) == {"{'failed': 'the process died'}"}


def test_without_options_it_is_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = gpu._options([])
    assert (options.parts, options.batch, options.minutes) == ("ABCDEF", [16, 64, 128], 8.0)
    rows = {name: arguments[0] for name, _, arguments in gpu.decoding(options)}
    assert set(rows) == set(gpu_tables.GOALS)
    whole = rows["llama-7b, batch 128"]
    assert (whole.prompt_tokens, whole.max_new_tokens, whole.ends) == ((256, 256), 256, False)
    assert (whole.dtype, whole.device) == ("bf16", "cuda")
    assert len(list(gpu.peers(options))) == 12
    work = gpu.step3_work(options)
    assert work.shape is SHAPES["opt-1.3b"]
    assert (work.num_prompts, work.prompt_tokens, work.max_new_tokens) == (64, (256,), 256)
    with torch.device("meta"):
        shapes = [work.shape, work.critic_shape, *(shape for shape, _ in LARGEST.values())]
        models = [random_model(model_config(s, 512)) for s in shapes if s is not None]
    sizes = [round(model.num_parameters() / 1e9, 1) for model in models]
    assert sizes == [1.3, 0.3, 13.0, 33.7]
    for name in LARGEST:
        work = largest_work(name, is_tiny=False, device="cuda")
        assert (work.num_prompts, work.dtype) == (32, "bf16")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "got cuda, but no GPU was found"),
        (["--device", "cpu"], "must come with --tiny"),
        ([*TRY, "--parts", "AX"], "--parts must be of ABCDEF; got X"),
    ],
)
def test_wrong_flags_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert said in capsys.readouterr().err
