"""The GPU's bench, tried on a CPU with tiny shapes: all of it runs, and what fails is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from bench.generation_sides import GenerationWork
from bench.harness import Ratio
from bench.models import SHAPES, model_config, random_model
from bench.ppo_sides import Work

TRY = ["--tiny", "--device", "cpu", "--rounds", "1", "--batch", "2", "--pairs", "2"]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child imports torch anew, which takes longer than all the rest."""
    monkeypatch.setattr(gpu, "in_child", lambda function, *arguments: function(*arguments))


def test_the_command_shows_all_parts_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.json"
    monkeypatch.setattr(gpu, "PEERS", (("hf",),))
    gpu.main([*TRY, "--parts", "generation", "step3", "--json", str(file)])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("tokens/s", "pairs/s", "ratio", "switching"))
    written = json.loads(file.read_text("utf-8"))
    assert list(written["generation"]) == [
        f"{model}, batch 2{kind}" for model in ("opt-1.3b", "llama-7b") for kind in ("", ", ragged")
    ]
    for groups in written["generation"].values():
        assert "failed" not in groups["hf"], groups["hf"]
        of = groups["hf"]["summary"]
        assert of["tandem"]["tokens_per_wall_second"] > 0
        assert of["hf"]["wall_ratio"]["median"] > 0
    step = written["step3"]
    for side in ("tandem", "plain"):
        assert step[side]["pairs_per_second"] == pytest.approx(2 / step[side]["step_seconds"])
        assert len(step[side]["rounds"]) == 1
    switch = step["tandem"]["switch"]
    assert switch["share_of_step"] == switch["seconds"] / step["tandem"]["step_seconds"]
    assert {"command", "commit", "machine", "versions"} <= written.keys()


def test_numbers_are_checked_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Work] = []
    monkeypatch.setattr(gpu, "agreement", lambda work: asked.append(work) or {"values": 1e-6})
    result = gpu.main([*TRY, "--parts", "agreement"])
    assert result["agreement"] == {"values": 1e-6}
    assert asked[0].device == "cpu"


def test_what_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(work: GenerationWork, sides: Any, *_: Any) -> Any:
        if sides == ("tandem", "hf-cb"):
            raise torch.OutOfMemoryError("CUDA out of memory\nand more")
        rates = {"tokens_per_wall_second": 7.0, "wall_ratio": Ratio(3.0, 3.0, 3.0)}
        summary = {side: {**rates, "share_of_limit": 0.5} for side in ("tandem", "hf")}
        return {"work": work, "summary": summary, "absent": {"hf-static": "too old"}}

    def died(*arguments: Any) -> Any:
        raise RuntimeError("the process died")

    monkeypatch.setattr(gpu, "measure_row", measure)
    file = tmp_path / "made.json"
    gpu.main([*TRY, "--parts", "generation", "--json", str(file)])
    groups = json.loads(file.read_text("utf-8"))["generation"]["llama-7b, batch 2"]
    assert groups["hf-cb"] == {"failed": "OutOfMemoryError: CUDA out of memory"}
    assert groups["hf hf-static"]["summary"]["hf"]["share_of_limit"] == 0.5
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("out of memory", "too old", "50%", "3.00"))
    monkeypatch.setattr(gpu, "in_child", died)
    result = gpu.main([*TRY, "--parts", "step3"])
    assert result["step3"]["plain"] == {"failed": "the process died"}
    assert "PPO step, tandem: the process died" in capsys.readouterr().out


def test_without_options_it_is_what_the_issue_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = gpu._options([])
    rows = dict(gpu.generation_rows(options))
    assert len(rows) == 16
    whole, ragged = rows["llama-7b, batch 512"], rows["opt-1.3b, batch 64, ragged"]
    assert (whole.prompt_tokens, whole.max_new_tokens, whole.ends) == ((256, 256), 256, False)
    assert (whole.dtype, whole.device, ragged.ends) == ("bf16", "cuda", True)
    work = gpu.step3_work(options)
    assert work.shape is SHAPES["opt-1.3b"]
    with torch.device("meta"):
        models = [random_model(model_config(s, 512)) for s in (work.shape, work.critic_shape)]
    sizes = [model.num_parameters() for model in models]
    assert [round(size, -8) for size in sizes] == [1_300_000_000, 300_000_000]
    assert (work.num_prompts, work.prompt_tokens, work.max_new_tokens) == (64, (256,), 256)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "got cuda, but no GPU was found"), (["--device", "cpu"], "must come with --tiny")],
)
def test_shapes_of_a_gpu_need_one(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not arguments and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert said in capsys.readouterr().err
