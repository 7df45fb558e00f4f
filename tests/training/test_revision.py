"""Hub models at a revision, NAME@REVISION, out of a cache like the hub's, without a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.errors import ModelError
from tandem.models import source
from tandem.models.hub_name import base_of, with_revision
from tandem.models.source import Located, locate
from tests.tiny import save_tiny_model

NAME, OLD, NEW = "somebody/tiny", "0123456789" * 4, "abcdef0123" * 4
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commits of a model: `main` is the newer one, `v1` the older."""
    root = tmp_path_factory.mktemp("cache")
    for seed, (ref, commit) in enumerate((("v1", OLD), ("main", NEW))):
        refs = repository(root) / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        (refs / ref).write_text(commit)
        save_tiny_model(repository(root) / "snapshots" / commit, seed=seed)
    return root


def repository(cache: Path) -> Path:
    return cache / f"models--{NAME.replace('/', '--')}"


def embeddings(cache: Path, commit: str) -> torch.Tensor:
    return load_file(repository(cache) / "snapshots" / commit / "model.safetensors")[EMBEDDINGS]


_READ = """
import json, os, sys
from tandem.cli import main
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.eos import load_stop_ids
from tandem.models.source import locate
from tandem.predict.models import config_of

def read(name):
    model = load_causal_lm(name)
    load_tokenizer(name), load_stop_ids(name)
    first = model.get_input_embeddings().weight[0].tolist()
    return locate(name).commit, first, model.name_or_path, config_of(name)["vocab_size"]

names, run, flags = json.loads(sys.argv[1])
models = [read(name) for name in names]
code = main(flags)
with open(os.path.join(run, "read.json"), "w") as file:
    json.dump([models, code, read(os.path.join(run, "sft", "adapter"))], file)
"""

NAMES = {NAME: NEW, f"{NAME}@main": NEW, f"{NAME}@v1": OLD, f"{NAME}@{OLD}": OLD}


@pytest.fixture(scope="module")
def run(cache: Path, tmp_path_factory: pytest.TempPathFactory, preferences: str) -> Path:
    """A run on a revision and, in read.json, what was read of all names and of the run's adapter:
    by a process of its own, as the hub's client reads where its cache is at its import."""
    run = tmp_path_factory.mktemp("adapter") / "run"
    knobs = "--lora-rank 2 --sft.max-steps 2 --sft.batch-size 4 --device cpu --dtype fp32".split()
    flags = ["--actor-model", f"{NAME}@v1", "--data", preferences, "--output-dir", str(run), *knobs]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _READ, json.dumps([[*NAMES], str(run), ["sft", *flags]])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


def test_a_revision_is_what_is_loaded(cache: Path, run: Path) -> None:
    found, *_ = json.loads((run / "read.json").read_text())
    assert not torch.equal(embeddings(cache, OLD), embeddings(cache, NEW))
    for (name, commit), (told, first, kept, size) in zip(NAMES.items(), found, strict=True):
        assert (told, kept) == (commit, name)
        assert first == embeddings(cache, commit)[0].tolist()
        assert size == len(embeddings(cache, commit))


def test_a_run_trains_on_it_and_its_adapter_says_so(cache: Path, run: Path) -> None:
    _, code, (_, first, _, size) = json.loads((run / "read.json").read_text())
    assert code == 0
    adapter = json.loads((run / "sft" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, "v1")
    card = (run / "sft" / "adapter" / "README.md").read_text()
    assert f'base_model: "{NAME}"' in card
    assert f"`{NAME}@v1`" in card
    assert first == embeddings(cache, OLD)[0].tolist()
    assert size == len(embeddings(cache, OLD))


@pytest.mark.parametrize(
    ("name", "asked"),
    [("a/b", ("a/b", None)), ("a/b@v1", ("a/b", "v1")), ("a/b@refs/pr/3", ("a/b", "refs/pr/3"))],
)
def test_the_hub_is_asked_for_it(
    name: str, asked: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        sha = OLD

        def model_info(self, name: str, *, revision: str | None, timeout: float) -> Hub:
            assert (name, revision) == asked
            return self

    monkeypatch.setattr(source, "HfApi", Hub)
    found = locate(name)
    assert found == Located(name, commit=OLD)
    assert (found.repository, found.options["revision"]) == asked


def test_a_revision_that_is_not_there_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda *_, **__: "h/config.json")
    with pytest.raises(ModelError, match=r"a/b@. must be .* no revision behind the @"):
        locate("a/b@")


def test_a_folder_may_be_called_so(tmp_path: Path) -> None:
    folder = tmp_path / "model@v1"
    save_tiny_model(folder)
    found = locate(folder)
    assert (found.repository, found.options["revision"]) == (str(folder), None)


def test_names_of_bases(tmp_path: Path) -> None:
    assert with_revision("a/b") == ("a/b", "")
    assert base_of({"base_model_name_or_path": "a/b", "revision": "v1"}, tmp_path) == "a/b@v1"
    assert base_of({"base_model_name_or_path": "a/b", "revision": None}, tmp_path) == "a/b"
    assert base_of({"base_model_name_or_path": None, "revision": "v1"}, tmp_path) == ""
    (tmp_path / "a" / "b").mkdir(parents=True)
    for folder in ("a/b", str(tmp_path / "a" / "b")):  # a folder has no revision
        assert base_of({"base_model_name_or_path": folder, "revision": "v1"}, tmp_path) == folder
