"""What a run is made from: a change of any of it between a stop and the same command is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelInfo

from tandem.checkpoint.state import newest_numbers
from tandem.config.schema import RunConfig
from tandem.config.spellings import RENAMED
from tandem.errors import CheckpointError, ConfigError
from tandem.models import source
from tandem.parallel.world import World
from tandem.rewards.loading import source_files
from tandem.training import run_folder
from tandem.training.provenance import Identity, difference
from tandem.training.stage_data import prepare_rows
from tests.tiny import tiny_config, write_preferences
from tests.training.runs import StopError, ran, stop_at


@dataclass(frozen=True)
class StoppedRun:
    """A run that stopped in PPO, and the folder of everything that it is made from."""

    config: RunConfig
    given: Path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[StoppedRun]:
    given = tmp_path_factory.mktemp("given")
    for name in ("base", "judge"):
        shutil.copytree(tiny_model, given / name)
    write_preferences(given / "data.jsonl", 60)
    write_preferences(given / "ptx.jsonl", 20, seed=5)
    package = given / "identity_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lengths.py").write_text("def score(text):\n    return -len(text) / 10\n")
    (package / "rule.py").write_text(
        "from identity_rewards.lengths import score\n"
        "def reward(prompts, completions, **columns):\n"
        "    return [score(c) for c in completions]\n"
    )
    sys.path.insert(0, str(given))
    config = tiny_config(
        given / "run", str(given / "base"), str(given / "data.jsonl"),
        reward_model=str(given / "judge"), ppo__ptx_data=[str(given / "ptx.jsonl")],
        ppo__reward_function="identity_rewards.rule:reward",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "ppo", 3)
        with pytest.raises(StopError):
            ran(config)
    yield StoppedRun(config, given)
    sys.path.remove(str(given))


def edited(path: Path) -> None:
    """A change that every reader takes."""
    text = path.read_text(encoding="utf-8")
    if path.name == "tokenizer.json":  # whose reader is strict
        path.write_text(json.dumps(json.loads(text)), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(json.loads(text) | {"note": 1}), encoding="utf-8")
    elif path.suffix == ".jsonl":
        first, _, rest = text.partition("\n")
        row = json.loads(first)
        row["chosen"] += " Indeed."
        path.write_text(f"{json.dumps(row)}\n{rest}", encoding="utf-8")
    else:
        remark = "{# changed #}" if path.suffix == ".jinja" else "# changed\n"
        path.write_text(remark + text, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("base/config.json", r"the files of actor_model \(config.json\)"),
        ("base/generation_config.json", r"the files of actor_model \(generation_config.json\)"),
        ("base/tokenizer.json", r"the files of actor_model \(tokenizer.json\)"),
        ("base/tokenizer_config.json", r"the files of actor_model \(tokenizer_config.json\)"),
        ("base/chat_template.jinja", r"the files of actor_model \(chat_template.jinja\)"),
        ("base/model.safetensors", r"the files of actor_model \(model.safetensors\)"),
        ("judge/config.json", r"the files of reward_model \(config.json\)"),
        ("judge/tokenizer.json", r"the files of reward_model \(tokenizer.json\)"),
        ("data.jsonl", r"the rows of data: data.jsonl has changed \(\d+ rows as before, of other"),
        ("ptx.jsonl", r"the rows of ptx_data: ptx.jsonl has changed \("),
        ("identity_rewards/rule.py", r"the reward function \(rule.py\)"),
        ("identity_rewards/lengths.py", r"the reward function \(lengths.py\)"),
    ],
)
def test_a_change_between_a_stop_and_the_same_command_is_refused_by_name(
    stopped: StoppedRun, file: str, said: str
) -> None:
    path = stopped.given / file
    before = path.read_bytes()
    if path.suffix == ".safetensors":
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    else:
        edited(path)
    checkpoints = sorted((stopped.given / "run" / "checkpoints").rglob("*"))
    try:
        with pytest.raises(CheckpointError, match=f"changed: {said}"):
            ran(stopped.config)
    finally:
        path.write_bytes(before)
    assert sorted((stopped.given / "run" / "checkpoints").rglob("*")) == checkpoints


def test_data_may_lie_in_another_folder_with_the_same_rows(
    stopped: StoppedRun, tmp_path: Path
) -> None:
    """As where a run goes on on another machine; not with other rows, nor with another weight."""
    config, rl = stopped.config, stopped.config.ppo
    for name in (*config.data, *rl.ptx_data):
        shutil.copy(name, tmp_path)
    names = [str(tmp_path / Path(name).name) for name in (*config.data, *rl.ptx_data)]
    before = newest_numbers(stopped.given / "run" / "checkpoints" / "ppo")
    assert before is not None

    def changes(data: str) -> list[str]:
        moved = replace(config, data=(data,), ppo=replace(rl, ptx_data=(names[-1],)))
        rows = prepare_rows(moved, config.actor_model, config.reward_model)
        identity = Identity(moved, stopped.given / "run", World())
        identity.note_rows([account.fingerprint for account in rows.ledger.datasets.values()])
        return identity.changes("ppo", before["made_from"])

    assert changes(names[0]) == []
    assert any(text.startswith("data ") for text in changes(f"{names[0]}:2"))
    edited(Path(names[0]))
    assert [text.partition(":")[0] for text in changes(names[0])] == ["the rows of data"]


def test_a_run_saved_under_earlier_names_is_the_same(stopped: StoppedRun) -> None:
    identity = Identity(stopped.config, stopped.given / "run", World())
    before = identity.made_from("ppo")
    for old, new in RENAMED.items():
        if new in before:
            before[old] = before.pop(new)
    for name in [name for name in before if name.endswith(" stage")]:
        before[f"{name.removesuffix('stage')}step"] = before.pop(name)
    assert {"ppo.kl_target", "ppo.target_kl"} <= before.keys()
    identity.require_same("ppo", stopped.given / "run", before)
    before["ppo.target_kl"] = 0.3
    with pytest.raises(CheckpointError, match=r"changed: ppo\.early_stop_kl 0\.3 -> 0\.1\. "):
        identity.require_same("ppo", stopped.given / "run", before)


def test_knobs_added_since_a_run_was_saved_count_as_their_defaults(stopped: StoppedRun) -> None:
    run = stopped.given / "run"
    before = Identity(stopped.config, run, World()).made_from("ppo")
    before = {k: v for k, v in before.items() if not k.startswith("scoring.")}
    before["ppo.reward_function"] = "identity_rewards.rule:reward"  # one text, before it was a list
    Identity(stopped.config, run, World()).require_same("ppo", run, before)
    scoring = replace(stopped.config.scoring, combine="group", deadline_seconds=1)
    other = replace(stopped.config, scoring=scoring)
    changed = r'changed: scoring\.combine "sum" -> "group", scoring\.deadline_seconds 5\.0 -> 1\. '
    with pytest.raises(CheckpointError, match=changed):
        Identity(other, run, World()).require_same("ppo", run, before)
    before["ppo.reward_function"] = "identity_rewards.rule:other"
    with pytest.raises(CheckpointError, match=r"changed: ppo\.reward_function \["):
        Identity(stopped.config, run, World()).require_same("ppo", run, before)


def test_a_parallel_knob_that_a_record_lacks_was_off(stopped: StoppedRun) -> None:
    run = stopped.given / "run"
    before = Identity(stopped.config, run, World()).made_from("ppo")
    parallel = replace(stopped.config.parallel, shared_base=True)
    other = Identity(replace(stopped.config, parallel=parallel), run, World())
    with pytest.raises(CheckpointError, match=r"changed: parallel\.shared_base null -> true\. "):
        other.require_same("ppo", run, before)


def test_a_schema_of_answers_counts_by_its_text(tiny_model: str, tmp_path: Path) -> None:
    write_preferences(tmp_path / "data.jsonl", 20)

    def identity(file: str) -> Identity:
        data, schema = str(tmp_path / "data.jsonl"), str(tmp_path / file)
        config = tiny_config(tmp_path / "run", tiny_model, data, sampling__json_schema=schema)
        return Identity(config, tmp_path / "run", World())

    first = tmp_path / "first.json"
    first.write_text('{"type": "object"}', encoding="utf-8")
    before = identity("first.json").made_from("ppo")
    shutil.copy(first, tmp_path / "moved.json")
    assert identity("moved.json").changes("ppo", before) == []
    edited(first)
    assert identity("first.json").changes("ppo", before) == ["the schema of answers (its text)"]
    first.unlink()
    with pytest.raises(ConfigError, match=r"^sampling.json_schema must be .* that can be read"):
        identity("first.json").made_from("ppo")


def test_what_nobody_reads_and_what_computes_may_change(
    stopped: StoppedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor goes on, and a line says that its bits are others."""
    (stopped.given / "base" / "README.md").write_text("a model card")
    now = run_folder.computed_by(torch.device("cpu"))
    monkeypatch.setattr(run_folder, "computed_by", lambda device: "AVX9, torch 2.13.0")
    lines: list[str] = []
    ran(stopped.config, lines=lines)
    assert "ppo: continuing after step 2 (checkpoint verified)" in lines
    note = f"ppo: note: computed by {now}, from here by AVX9, torch 2.13.0: last bits differ"
    assert [line for line in lines if "last bits differ" in line] == [note]


def test_columns_that_a_reward_function_reads_are_of_the_rows(
    tmp_path: Path, tiny_model: str
) -> None:
    """A prompt alone, and a column with its answer."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "Say {i}", "answer": "{i}"}}\n' for i in range(20)))
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def right(prompts, completions, answer, **columns):\n"
        "    return [float(a in c) for a, c in zip(answer, completions)]\n"
    )
    config = tiny_config(
        tmp_path / "run", tiny_model, str(data), stages=["ppo"],
        ppo__reward_function=f"{rewards}:right", dataset__split=[0, 0, 1],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "ppo", 3)
        with pytest.raises(StopError):
            ran(config)
    data.write_text(data.read_text().replace('"answer": "7"', '"answer": "8"'))
    with pytest.raises(CheckpointError, match="changed: the rows of data"):
        ran(config)


def test_the_sources_of_a_reward_function_leave_libraries_out(tmp_path: Path) -> None:
    (tmp_path / "identity_helper.py").write_text("LIMIT = 3\n")
    path = tmp_path / "many.py"
    path.write_text(
        "import json, torch\nfrom tandem.types import Message\nimport identity_helper\n"
        "def reward(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert source_files(f"{path}:reward") == [tmp_path / "identity_helper.py", path]
    ours = source_files("tandem.training.exact_number:reward")
    assert [file.name for file in ours] == ["exact_number.py"]


def test_a_hub_name_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Hub:
        def model_info(self, name: str, revision: str | None, timeout: float) -> ModelInfo:
            return ModelInfo(id=name, sha="c0ffee")

    monkeypatch.setattr(source, "HfApi", Hub)
    config = RunConfig(actor_model="some/model", output_dir=str(tmp_path))
    assert Identity(config, tmp_path, World()).files_of("actor_model") == {"commit": "c0ffee"}


def test_a_stage_whose_folder_was_removed_is_not_called_changed() -> None:
    files = {"config.json": "1", "model.safetensors": "2"}
    assert difference("the sft stage", files, None) == "the sft stage (its folder is gone)"
    changed = difference("the sft stage", files, {**files, "config.json": "3"})
    assert changed == "the sft stage (config.json)"
