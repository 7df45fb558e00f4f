"""`NAME@CONFIGURATION/SPLIT`: how it is read, and what is asked of which reader for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.config.dataset import DataConfig
from tandem.data.dataset import load_data
from tandem.data.reading.parts import Part, part_of
from tandem.data.reading.sources import files_left, parse_spec, read_rows
from tandem.data.rows import RawRow
from tandem.data.sampled import sampled
from tandem.errors import ConfigError, DataError
from tests.jsonl import write_jsonl


def texts(name: str) -> list[str]:
    return [row.columns["text"] for row in read_rows(parse_spec(name)) if isinstance(row, RawRow)]


def refused(name: str) -> str:
    with pytest.raises(DataError) as error:
        list(read_rows(parse_spec(name)))
    assert "\n" not in str(error.value)
    return str(error.value)


def folder_with(path: Path, names: list[str]) -> str:
    """A folder of files that each hold their own name."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"text": name}) + "\n")
    return str(path)


def with_card(path: Path) -> str:
    """A folder whose card declares two configurations, one of two splits."""
    folder = folder_with(path, ["a/train.jsonl", "a/heldback.jsonl", "b/rows.jsonl"])
    (path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: a/train.jsonl\n  - split: unseen\n    path: a/heldback.jsonl\n"
        "- config_name: other\n  data_files: b/rows.jsonl\n---\n# Rows\n"
    )
    return folder


@pytest.mark.parametrize(
    ("text", "base", "config", "split", "name"),
    [
        ("openai/gsm8k@main", "openai/gsm8k", "main", "", "openai/gsm8k@main"),
        ("openai/gsm8k@main/test:2", "openai/gsm8k", "main", "test", "openai/gsm8k@main/test"),
        ("a/b@/train_prefs::prompt=q", "a/b", "", "train_prefs", "a/b@/train_prefs"),
        ("a/b@deep/folder/train", "a/b", "deep/folder", "train", "a/b@deep/folder/train"),
        ("a/b@deep/folder/", "a/b", "deep/folder", "", "a/b@deep/folder/"),
        ("a/b", "a/b", "", "", "a/b"),
        ("a@b.jsonl", "a@b.jsonl", "", "", "a@b"),
        ("no/such/folder@x", "no/such/folder@x", "", "", "folder@x"),
        ("me@host/rows.jsonl.gz", "me@host/rows.jsonl.gz", "", "", "rows"),
        ("reasoning-gym:t?a=b@c", "reasoning-gym:t?a=b@c", "", "", "t"),
    ],
)
def test_a_name_is_read(text: str, base: str, config: str, split: str, name: str) -> None:
    spec = parse_spec(text)
    part = part_of(spec.path)
    assert (part.base, part.config, part.split) == (base, config, split)
    assert part.text == spec.path
    assert spec.name == name


def test_an_at_in_a_real_name_is_that_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "a@b", ["rows.jsonl", "sub@2/test.jsonl", "sub@2/train.jsonl"])
    assert part_of(folder) == Part(folder, text=folder)
    assert texts(f"{folder}/sub@2") == ["sub@2/train.jsonl"]
    assert texts(f"{folder}/sub@2@/test") == ["sub@2/test.jsonl"]
    assert parse_spec(f"{folder}/sub@2@/test").name == "sub@2@/test"


@pytest.mark.parametrize("text", ["a/b@", "a/b@/"])
def test_something_must_follow_the_at(text: str) -> None:
    with pytest.raises(ConfigError, match="must name a configuration or a split behind the @"):
        parse_spec(text)


def test_a_split_of_a_folder_is_its_files(tmp_path: Path) -> None:
    names = [
        "train-00000-of-00002.jsonl", "train_more.jsonl", "dev/a.jsonl", "test_prefs.jsonl",
        "my_test.jsonl", "extra.jsonl",
    ]  # fmt: skip
    folder = folder_with(tmp_path / "prefs", names)
    assert texts(folder) == ["extra.jsonl", "train-00000-of-00002.jsonl", "train_more.jsonl"]
    assert texts(f"{folder}@/train") == ["train-00000-of-00002.jsonl", "train_more.jsonl"]
    assert texts(f"{folder}@/val") == texts(f"{folder}@/validation") == ["dev/a.jsonl"]
    assert texts(f"{folder}@/test") == ["my_test.jsonl", "test_prefs.jsonl"]
    assert texts(f"{folder}@/test_prefs") == ["test_prefs.jsonl"]
    assert texts(f"{folder}@/extra") == ["extra.jsonl"]
    assert len(files_left(parse_spec(folder))[0]) == 3
    assert files_left(parse_spec(f"{folder}@/train")) == ([], [])
    said = refused(f"{folder}@/test_pref")
    assert "must name one of its splits (train, validation, test, train_more, " in said
    assert f"got 'test_pref'. Did you mean {folder}@/test_prefs?" in said


def test_a_configuration_of_a_folder_is_a_folder_in_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "hh", ["base/train.jsonl", "base/test.jsonl", "online/a.jsonl"])
    assert texts(f"{folder}@base") == ["base/train.jsonl"]
    assert texts(f"{folder}@base/test") == ["base/test.jsonl"]
    assert texts(f"{folder}@online/") == ["online/a.jsonl"]
    assert files_left(parse_spec(f"{folder}@base")) == (["test.jsonl"], [])
    said = refused(f"{folder}@onlin/train")
    assert "configurations (base, online); got 'onlin'. Did you mean " in said
    assert said.endswith(f"{folder}@online/train?")
    assert "splits (it has none); got 'test'" in refused(f"{folder}@online/test")
    file = f"{folder}/online/a.jsonl"
    assert f"got a file. Write {file}." in refused(f"{file}@main")
    assert "got the built-in one. Write embedded." in refused("embedded@main")
    assert refused(f"{folder}@base/dev").endswith(f"Write e.g. {folder}@base/train.")


@pytest.mark.parametrize("head", ["configs: 5", "configs: true", "configs: [1, a]", "[" * 1000])
def test_a_card_that_declares_nothing_readable_changes_nothing(head: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "set", ["a.jsonl"])
    Path(folder, "README.md").write_text(f"---\n{head}\n---\n")
    found = load_data(DataConfig(), [str(folder)], seed=1, stages=("sft",))
    assert found.ledger.datasets["set"].rows == 1
    assert "got '../set'" in refused(f"{folder}@../set/")


def test_the_parts_that_a_local_card_declares_are_read_by_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = with_card(tmp_path / "set")
    assert texts(f"{folder}@main") == ["a/train.jsonl"]
    assert texts(f"{folder}@main/unseen") == ["a/heldback.jsonl"]
    assert texts(f"{folder}@other") == ["b/rows.jsonl"]
    assert texts(f"{folder}@b") == ["b/rows.jsonl"]  # a folder that is not declared
    (row,) = read_rows(parse_spec(f"{folder}@main/unseen"))
    assert (row.source.dataset, row.source.path) == ("set@main/unseen", f"{folder}@main/unseen")
    said = refused(f"{folder}@mian")
    assert "configurations (main, other, a, b); got 'mian'. Did you mean " in said
    assert "splits (train, unseen); got 'test'" in refused(f"{folder}@main/test")
    said = refused(f"{folder}@/train")
    assert "one of its configurations (main, other); got none" in said
    assert said.endswith(f"Write e.g. {folder}@main/train.")


def test_a_folder_whose_configurations_are_all_read_says_so(tmp_path: Path) -> None:
    folder = with_card(tmp_path / "set")
    found = load_data(DataConfig(), [folder], seed=1, stages=("sft",))
    (account,) = found.ledger.datasets.values()
    assert account.notes[f"configurations of one folder, all read (one alone: {folder}@main)"] == 2
    found = load_data(DataConfig(), [f"{folder}@b"], seed=1, stages=("sft",))
    (account,) = found.ledger.datasets.values()
    assert not account.notes


def test_saved_datasets_have_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict(train=rows, unseen=rows).save_to_disk(str(tmp_path / "two"))
    rows.save_to_disk(str(tmp_path / "one"))
    assert texts(f"{tmp_path}/two@/unseen") == texts(f"{tmp_path}@two/unseen") == ["a"]
    assert "splits (train, unseen); got 'x'" in refused(f"{tmp_path}/two@/x")
    assert "splits (it has none); got 'train'" in refused(f"{tmp_path}/one@/train")
    assert "configurations (it has none); got 'x'" in refused(f"{tmp_path}/one@x")


def test_pictures_and_sounds_stay_bytes_as_in_parquet(tmp_path: Path) -> None:
    """What they decode to is another object each time, and a run could not be continued."""
    datasets = pytest.importorskip("datasets")
    file = {"bytes": b"a file", "path": "a"}
    rows = datasets.Dataset.from_list([{"text": "a", "seen": [file, file], "heard": file}])
    rows = rows.cast_column("heard", datasets.Audio())
    rows = rows.cast_column("seen", datasets.List(datasets.Image()))
    rows.save_to_disk(str(tmp_path / "saved"))
    rows.to_parquet(tmp_path / "rows.parquet")
    for name in ("saved", "rows.parquet"):
        (row,) = read_rows(parse_spec(str(tmp_path / name)))
        assert isinstance(row, RawRow)
        assert row.columns == {"text": "a", "seen": [file, file], "heard": file}, name


Loader = Callable[..., Any]


def hub(monkeypatch: pytest.MonkeyPatch, load: Loader) -> list[tuple[Any, ...]]:
    """What `load_dataset` was asked for, instead of the hub, which answers."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*names: str, **options: str) -> Any:
        asked.append((*names, *options.items()))
        return load(*names, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_hub_name_is_asked_for_with_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": [{"text": "a"}], "test": [{"text": "b"}]}
    asked = hub(monkeypatch, lambda *names: splits)
    assert texts("openai/gsm8k@main") == ["a"]
    assert texts("openai/gsm8k@main/test:0.5") == ["b"]
    assert texts("openai/gsm8k@/test") == ["b"]
    assert asked == [("openai/gsm8k", "main")] * 2 + [("openai/gsm8k",)]
    said = refused("openai/gsm8k@main/tset")
    assert "its splits (train, test); got 'tset'. Did you mean openai/gsm8k@main/test?" in said


def test_a_hub_folder_is_asked_for_where_no_configuration_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str, *config: str, data_dir: str = "") -> Any:
        if config:
            raise ValueError(f"BuilderConfig '{config[0]}' not found. Available: ['default']")
        if data_dir != "harmless-base":
            raise FileNotFoundError(f"Couldn't find any data file at hf://{data_dir}")
        return {"train": [{"text": "a"}], "test": [{"text": "b"}]}

    asked = hub(monkeypatch, load)
    assert texts("Anthropic/hh-rlhf@harmless-base/test") == ["b"]
    assert asked == [
        ("Anthropic/hh-rlhf", "harmless-base"),
        ("Anthropic/hh-rlhf", ("data_dir", "harmless-base")),
    ]
    said = refused("Anthropic/hh-rlhf@harmles")
    assert "one of its configurations (default); got 'harmles'. Write e.g. Anthropic/hh" in said


@pytest.mark.parametrize(
    "said",
    [
        (
            "Config name is missing.\nPlease pick one among the available configs: "
            "['main', 'socratic']\nExample of usage:\n\t`load_dataset('gsm8k', 'main')`"
        ),
        (
            "There are multiple 'openai/gsm8k' configurations in the cache: main, socratic\n"
            "Please specify which configuration to reload from the cache, e.g.\n\tload_dataset()"
        ),
    ],
)
def test_a_configuration_that_must_be_named_is_listed(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        raise ValueError(said)

    hub(monkeypatch, load)
    assert refused("openai/gsm8k") == (
        "data set openai/gsm8k must name one of its configurations (main, socratic); got none. "
        "Write e.g. openai/gsm8k@main."
    )
    assert refused("openai/gsm8k@/test").endswith("Write e.g. openai/gsm8k@main/test.")


def test_the_cache_lists_its_configurations_but_not_its_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str, *config: str, data_dir: str = "") -> Any:
        raise ValueError(
            f"Couldn't find cache for {name} for config '{config or data_dir}'\nAvailable configs "
            "in the cache: ['default-38cb0698097394cb', 'main']"
        )

    hub(monkeypatch, load)
    assert "one of its configurations (main); got 'mian'. Did you mean" in refused("a/b@mian")


def test_splits_without_train_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, lambda name: {"train_prefs": [{"text": "a"}], "train_sft": [{"text": "b"}]})
    assert refused("HuggingFaceH4/ultrafeedback_binarized").endswith(
        "one of its splits, since none is named train (train_prefs, train_sft); got none. "
        "Write e.g. HuggingFaceH4/ultrafeedback_binarized@/train_prefs."
    )
    assert texts("HuggingFaceH4/ultrafeedback_binarized@/train_sft") == ["b"]


def test_no_network_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: str) -> Any:
        raise ConnectionError("Couldn't reach the Hub\nTraceback")

    asked = hub(monkeypatch, load)
    assert "must be a file, a folder or a reachable hub name; got Conn" in refused("a/b@main/test")
    assert asked == [("a/b", "main")]


def test_parts_are_data_sets_of_their_own_in_a_run_and_a_plan(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split, count in (("train", 40), ("test", 5)):
        rows = [{"prompt": f"{split} {i}", "completion": "yes"} for i in range(count)]
        write_jsonl(folder / f"{split}.jsonl", rows)
    data, held_out = [f"{folder}@/train"], [f"{folder}@/test"]
    found = load_data(DataConfig(), data, (), held_out, seed=1, stages=("sft",))
    assert list(found.ledger.datasets) == ["set@/train", "set@/test"]
    assert (len(found.texts), len(found.heldout)) == (40, 5)
    whole = load_data(DataConfig(), [str(folder)], (), held_out, seed=1, stages=("sft",))
    accounts = [list(f.ledger.datasets.values()) for f in (found, whole)]
    assert [a.fingerprint for a in accounts[0]] == [a.fingerprint for a in accounts[1]]
    read, every = sampled([*data, *held_out])
    assert every == 1
    assert [len(list(read(parse_spec(name)))) for name in (*data, *held_out)] == [40, 5]
