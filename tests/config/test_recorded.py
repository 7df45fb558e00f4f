"""A run's files, seen from another folder than it was made in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.load import build_config, plain_values
from tandem.config.recorded import is_gone, places, with_found, with_found_models
from tandem.config.schema import RunConfig

NAMES = {
    "actor_model": "my-model",
    "reward_model": "org/name",
    "data": ["rows.jsonl:2::prompt=q", "/abs/rows.jsonl", "hub/rows", "reasoning-gym:add?size=3"],
    "ppo": {
        "reward_function": ["rewards.py:score?limit=3", "tandem:gsm8k:0", "package.module:score"]
    },
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of a run in `run`, made in `home`; the working folder is another."""
    home, run = tmp_path / "home", tmp_path / "run"
    (home / "my-model").mkdir(parents=True)
    (home / "my-model" / "config.json").write_text("{}")
    for name in ("rows.jsonl", "rewards.py"):
        (home / name).write_text("")
    run.mkdir()
    monkeypatch.chdir(home)
    config = build_config(NAMES)
    (run / "environment.json").write_text(json.dumps({"torch": "2", **places(config)}))
    monkeypatch.chdir(tmp_path)
    return config


def test_what_is_not_here_is_found_where_the_run_was_made(made: RunConfig, tmp_path: Path) -> None:
    home, found = tmp_path / "home", with_found(made, tmp_path / "run")
    assert found.actor_model == f"{home}/my-model"
    assert found.reward_model == "org/name"
    assert found.data == (f"{home}/rows.jsonl:2::prompt=q", *made.data[1:])
    functions = made.ppo.reward_function
    assert found.ppo.reward_function == (f"{home}/rewards.py:score?limit=3", *functions[1:])
    values, before = plain_values(found), plain_values(made)
    for section in (values, before):
        for name in ("actor_model", "data", "ppo"):
            del section[name]
    assert values == before


def test_what_is_here_goes_first(
    made: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("my-model", "rows.jsonl", "rewards.py"):
        (tmp_path / name).mkdir()
    assert with_found(made, tmp_path / "run") == made
    monkeypatch.chdir(tmp_path / "home")
    assert with_found(made, tmp_path / "run") == made


def test_a_model_that_is_gone_is_looked_for_beside_the_run(made: RunConfig, tmp_path: Path) -> None:
    model = tmp_path / "home" / "my-model"
    for place in (tmp_path / "my-model-of-old", tmp_path / "run" / "my-model"):
        model = model.rename(place)
    assert with_found_models(made, tmp_path / "run").actor_model == str(model)
    model.rename(tmp_path / "renamed")
    gone = with_found_models(made, tmp_path / "run").actor_model
    assert gone == str(tmp_path / "home" / "my-model")
    assert is_gone(gone)
    assert not is_gone("org/name")
    assert not is_gone("")


def test_runs_from_before_keep_their_names(made: RunConfig, tmp_path: Path) -> None:
    for text in ("{}", "[1]", "{"):
        (tmp_path / "run" / "environment.json").write_text(text)
        assert with_found(made, tmp_path / "run") == made
    assert places(replace(made, actor_model=""))["folder"] == str(tmp_path)
