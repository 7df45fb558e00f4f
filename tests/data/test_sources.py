"""Naming data sets, and finding what a name stands for."""

from __future__ import annotations

import builtins
import gzip
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from tandem.data.reading import sources as sources_module
from tandem.data.reading.sources import (
    DataSpec,
    _looks_like_file,
    files_left,
    parse_columns,
    parse_spec,
    read_rows,
)
from tandem.data.rows import BadRow, RawRow
from tandem.errors import ConfigError, DataError
from tandem.types import Source


def columns_of(text: str) -> list[Any]:
    return [row.columns for row in read_rows(parse_spec(text)) if isinstance(row, RawRow)]


@pytest.mark.parametrize(
    ("text", "path", "weight", "columns"),
    [
        ("a.jsonl", "a.jsonl", 1.0, {}),
        ("a.jsonl:2", "a.jsonl", 2.0, {}),
        ("a.jsonl:.5", "a.jsonl", 0.5, {}),
        ("a.jsonl:1e-1", "a.jsonl", 0.1, {}),
        ("C:/data/a.jsonl", "C:/data/a.jsonl", 1.0, {}),
        (r"C:\data\a.jsonl:3", r"C:\data\a.jsonl", 3.0, {}),
        ("dir:2024/a.jsonl", "dir:2024/a.jsonl", 1.0, {}),
        ("Anthropic/hh-rlhf:0.5", "Anthropic/hh-rlhf", 0.5, {}),
        ("odd::name.jsonl", "odd::name.jsonl", 1.0, {}),
        ("a.csv::prompt=q", "a.csv", 1.0, {"prompt": "q"}),
        ("a.csv:2::prompt=q,chosen= a b ", "a.csv", 2.0, {"prompt": "q", "chosen": "a b"}),
        ("C:/a.csv:2::text=x:1", "C:/a.csv", 2.0, {"text": "x:1"}),
    ],
)
def test_a_name_is_split_into_path_weight_and_columns(
    text: str, path: str, weight: float, columns: dict[str, str]
) -> None:
    spec = parse_spec(text)
    assert (spec.path, spec.weight, spec.columns) == (path, weight, columns)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("prefs/politeness_rasbt.jsonl.gz", "politeness_rasbt"),
        ("a/train.parquet:2", "train"),
        ("a/b/", "b"),
        ("Anthropic/hh-rlhf", "Anthropic/hh-rlhf"),
        ("embedded", "embedded"),
        (r"C:\x\a.json", "a"),
    ],
)
def test_a_short_name_for_reports(text: str, name: str) -> None:
    assert parse_spec(text).name == name


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "-inf", "0.0", "1001", "1e9"])
def test_a_weight_must_be_positive_and_within_reason(weight: str) -> None:
    with pytest.raises(ConfigError, match=f"above 0 and at most 1,000; got {weight}"):
        parse_spec(f"a.jsonl:{weight}")
    assert parse_spec("a.jsonl:1000").weight == 1000


@pytest.mark.parametrize("name", ["prefs.xlsx", "mine/prefs.pdf", "prefs.jsonll", "rows.txtt.gz"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match=r"must be an existing file, .*\.parquet.*got no such file"):
        list(read_rows(parse_spec(name)))


def test_a_name_with_a_version_may_be_on_the_hub() -> None:
    for name in ("user/data-v1.5", "user/data.en", "squad", "user/Qwen2.5-prefs"):
        assert not _looks_like_file(name)


def test_a_link_to_nowhere_is_told_from_a_typo(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"got a link to .*gone\.jsonl, which does not exist"):
        list(read_rows(parse_spec(str(tmp_path / "rows.jsonl"))))


@pytest.mark.parametrize("text", ["", ":2", "::prompt=q"])
def test_a_data_set_needs_a_path(text: str) -> None:
    with pytest.raises(ConfigError, match="must name a file, folder or hub name; got none"):
        parse_spec(text)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["prompt"], "must hold role=column items; got 'prompt'"),
        (["prompt="], "must hold role=column items"),
        (["promt=q"], "got 'promt'. Did you mean prompt?"),
        (["zzz=q"], "got 'zzz'. Use one of them."),
        (["prompt=a", "prompt=b"], "map each role once; got prompt twice"),
    ],
)
def test_column_maps_are_checked(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_columns(items, "dataset.columns")
    assert message in str(error.value)
    assert str(error.value).startswith("dataset.columns must")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("link", "advice"),
    [
        ("https://huggingface.co/datasets/Anthropic/hh-rlhf", "Write Anthropic/hh-rlhf."),
        ("hf://datasets/Anthropic/hh-rlhf/", "Write Anthropic/hh-rlhf."),
        ("https://huggingface.co/datasets/a/b/resolve/main/c.jsonl", "Download it, and give the"),
        ("s3://bucket/rows.jsonl", "Download it, and give the file."),
    ],
)
def test_a_link_is_answered_with_what_to_give(link: str, advice: str) -> None:
    with pytest.raises(DataError, match="a file, a folder or a hub name; got a link") as error:
        columns_of(link)
    assert advice in str(error.value)


@pytest.mark.parametrize("pattern", ["*.jsonl", "part-?.jsonl", "part-[01].jsonl"])
def test_a_pattern_is_left_to_the_shell(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "part-0.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"got a pattern\. Give the folder, or write the pattern w"):
        columns_of(str(tmp_path / pattern))
    (tmp_path / pattern).write_text('{"text": "b"}\n')  # the name of a file that is there
    assert columns_of(str(tmp_path / pattern)) == [{"text": "b"}]


def test_a_column_map_behind_one_colon_is_told(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("q,a\n1,2\n")
    given = f"{tmp_path}/p.csv:prompt=q,completion=a"
    with pytest.raises(DataError, match=r"two colons .*Write .*p\.csv::prompt=q,completion=a\."):
        list(read_rows(parse_spec(given)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no.jsonl must be an existing file or folder"):
        list(read_rows(parse_spec(str(tmp_path / "no.jsonl"))))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("data/prefs.jsnl", "data/prefs.jsonl"),
        ("data/pref", "data/prefs"),
        ("prefs.jsnl", "prefs.jsonl"),
        ("FOLDER/data/prefs.jsol", "data/prefs.jsonl"),
    ],
)
def test_a_slip_of_the_pen_is_found_here_and_not_on_the_hub(
    name: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for file in ("data/prefs.jsonl", "prefs.jsonl", "data/prefs"):
        (tmp_path / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources_module, "rows_through_datasets", lambda *a: pytest.fail("the hub"))
    with pytest.raises(DataError, match=rf"got neither. Did you mean .*{near}\?"):
        list(read_rows(parse_spec(name.replace("FOLDER", str(tmp_path)))))


@pytest.mark.parametrize("name", ["gsm8k", "imdb", "data/other", "someone/prefs"])
def test_hub_names_are_asked_for_though_files_here_are_like_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for file in ("gsm8k.jsonl", "imdb2", "data/prefs.jsonl"):
        (tmp_path / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    row = RawRow({}, Source(name, name, 1))
    monkeypatch.setattr(sources_module, "rows_through_datasets", lambda *a: iter([row]))
    assert list(read_rows(parse_spec(name))) == [row]


@pytest.mark.parametrize(
    ("name", "advice"),
    [("a.tab", "Rename it to .tsv"), ("a.jsonl.xz", "Unpack it"), ("a.zst", "Unpack it"),
     ("a.odd", "Rename it")],
)  # fmt: skip
def test_what_to_do_with_another_ending(name: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=advice):
        list(read_rows(parse_spec(str(tmp_path / name))))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for name in ("a.json", "a.jsonl", "a.csv", "a.tsv", "a.txt"):
        (tmp_path / name).write_bytes(b"\n  \n")
        with pytest.raises(DataError, match="must hold at least one row; got none"):
            list(read_rows(parse_spec(str(tmp_path / name))))


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match=r"must end in one of .json, .jsonl.*got 'a.xlsx'"):
        list(read_rows(parse_spec(str(tmp_path / "a.xlsx"))))


def test_a_folder_gives_its_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b.csv").write_text("text\nthree\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "data" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}\n'))
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache" / "x.jsonl").write_text('{"text": "hidden"}\n')
    rows = list(read_rows(parse_spec(str(tmp_path))))
    assert [row.columns["text"] for row in rows if isinstance(row, RawRow)] == [
        "one",
        "three",
        "four",
    ]
    assert {row.source.dataset for row in rows} == {tmp_path.name}
    assert rows[1].source.path.endswith("b.csv")


def folder_of(path: Path, names: list[str]) -> DataSpec:
    for name in names:
        file = path / "my-test" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": name}) + "\n")
    return parse_spec(str(path / "my-test"))


def test_a_folder_with_splits_gives_the_one_to_train_on(tmp_path: Path) -> None:
    read = ["data/train-00000-of-00002.jsonl", "more.jsonl", "train/a.jsonl"]
    left = ["data/test-0.jsonl", "dev/a.jsonl", "my_validation.jsonl"]
    spec = folder_of(tmp_path, [*read, *left])
    assert [row.columns["text"] for row in read_rows(spec) if isinstance(row, RawRow)] == read
    assert files_left(spec) == (left, [])


def test_a_folder_without_a_train_split_gives_all_its_files(tmp_path: Path) -> None:
    names = ["contest.jsonl", "latest.jsonl", "test.jsonl", "train_or_test.jsonl"]
    spec = folder_of(tmp_path, names)
    assert [row.columns["text"] for row in read_rows(spec) if isinstance(row, RawRow)] == names
    assert files_left(spec) == ([], [])
    assert files_left(parse_spec("embedded")) == ([], [])


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no data")
    with pytest.raises(DataError, match="must hold files that end in one of"):
        list(read_rows(parse_spec(str(tmp_path))))


def test_embedded_is_the_built_in_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.data import embedded

    def rows(num: int = 2, seed: int = 0) -> Iterator[dict[str, str]]:
        for i in range(num):
            yield {"prompt": f"p{i}", "chosen": "a", "rejected": "b"}

    monkeypatch.setattr(embedded, "rows", rows, raising=False)
    first, second = read_rows(parse_spec("embedded"))
    assert str(first.source) == "embedded:1"
    assert isinstance(second, RawRow)
    assert second.columns["prompt"] == "p1"


def test_blank_lines_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "one"}\r\n  \r\n\n')
    blanks: list[None] = []
    spec = parse_spec(str(tmp_path / "a.jsonl"))
    assert len(list(read_rows(spec, on_blank=lambda: blanks.append(None)))) == 1
    assert len(blanks) == 3


# Through the datasets package ---------------------------------------------------------------------


def test_saved_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, {"prompt": "b"}]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(test=saved.select([1]), train=saved).save_to_disk(str(tmp_path / "two"))
    datasets.DatasetDict(other=saved).save_to_disk(str(tmp_path / "three"))
    for name in ("one", "two", "three"):
        found = list(read_rows(parse_spec(str(tmp_path / name))))
        assert [row.source.line for row in found] == [1, 2]
        assert isinstance(found[0], RawRow)
        assert found[0].columns["messages"] == rows[0]["messages"]


def test_a_saved_dataset_with_splits_to_choose_from_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict(valid=saved, test=saved).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"since none is named train \(valid, test\).*d@/valid"):
        list(read_rows(parse_spec(str(tmp_path / "d"))))


def test_a_damaged_saved_dataset_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="must be a folder saved by datasets; got") as error:
        list(read_rows(parse_spec(str(tmp_path))))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("answer", ["rows", "not found"])
def test_hub_names_go_through_load_dataset(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub says of them first."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def dataset_info(hub: Any, name: str, **_: Any) -> None:
        if answer == "not found":
            response = SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("404", response=response)  # type: ignore[arg-type]

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)

    def load_dataset(name: str) -> Any:
        asked.append(name)
        assert not datasets.config.HF_HUB_OFFLINE
        return {"train": [{"text": "a"}], "test": [{"text": "b"}]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (row,) = read_rows(parse_spec("someone/some-set:2"))
    assert asked == ["someone/some-set"]
    assert str(row.source) == "someone/some-set:1"


def without_network(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    """The hub's address, where nothing listens; who waits to ask it again fails."""
    datasets = pytest.importorskip("datasets")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: pytest.fail("waited"))
    return hub


def test_no_network_is_one_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = without_network(monkeypatch, tmp_path)
    with pytest.raises(DataError) as error:
        list(read_rows(parse_spec("someone/some-set")))
    assert re.fullmatch(
        "data set someone/some-set must be a file, a folder or a reachable hub name; got no such "
        rf"path, nothing in the cache and no answer from {hub} \(.*refused\). Check the spelling "
        "and the network, or give a local file.",
        str(error.value),
    )


def test_without_network_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_network(monkeypatch, tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text('{"text": "kept"}\n')
    import datasets

    datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"))
    (made,) = (tmp_path / "cache/json").iterdir()
    kept = tmp_path / "cache/someone___some-set/default"  # as if it had come from the hub
    kept.parent.mkdir()
    made.rename(kept)
    (rows,) = kept.rglob("json-train.arrow")
    rows.rename(rows.with_name("some-set-train.arrow"))
    assert columns_of("someone/some-set") == [{"text": "kept"}]
    assert not datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: pytest.fail("asked"))
    assert columns_of("someone/some-set") == [{"text": "kept"}]


@pytest.mark.parametrize(
    ("package", "name"), [("datasets", "someone/set"), ("pyarrow", "a.parquet")]
)
def test_a_missing_package_names_the_install_command(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_import = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == package:
            raise ImportError(module)
        return real_import(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"no such package. Run pip install datasets pyarrow"):
        list(read_rows(parse_spec(name)))


def test_local_files_do_not_import_datasets(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    code = (
        "import sys; from tandem.data.reading.sources import *; "
        f"print(len(list(read_rows(parse_spec({str(tmp_path / 'a.jsonl')!r})))));"
        "print([m for m in ('datasets', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]


def test_all_formats_agree(tmp_path: Path) -> None:
    """The same rows by every road: each format is an oracle for the others."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [
        {"prompt": 'a, "b"\nc', "completion": "é\u2028x"},
        {"prompt": "d", "completion": "  e "},
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "plain.jsonl.gz").write_bytes(lines.encode())
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "object.json").write_text(json.dumps({"version": 1, "data": rows}))
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    import csv

    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for file in sorted(p.name for p in tmp_path.iterdir()):
        assert columns_of(str(tmp_path / file)) == rows, file


def test_bad_rows_keep_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n')
    first, second, third = read_rows(parse_spec(str(tmp_path / "a.jsonl")))
    assert isinstance(second, BadRow)
    assert second.source.line == 2
    assert isinstance(first, RawRow)
    assert isinstance(third, RawRow)


@pytest.mark.parametrize("name", ["~no_such_user_here/a.jsonl", "x" * 5000, "a/" * 4000])
def test_a_path_that_cannot_be_is_one_line(name: str) -> None:
    with pytest.raises(DataError, match="must be a valid path; got") as error:
        list(read_rows(parse_spec(name)))
    assert len(str(error.value)) < 300


def test_a_name_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have a name in UTF-8"):
        parse_spec("a\udcff.jsonl")


@pytest.mark.parametrize("name", ["json", "csv", "text", "parquet"])
def test_the_name_of_a_format_does_not_read_the_current_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="got the name of a format"):
        list(read_rows(parse_spec(name)))


def test_links_and_pipes_of_a_folder_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "b.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"b.jsonl must be a file; got a broken link"):
        list(read_rows(parse_spec(str(tmp_path))))


def test_saved_rows_that_python_cannot_take_are_bad_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    cells = arrow.array([b"a", b"\xff", b"c", b"\xfe"], arrow.binary())
    text = arrow.StringArray.from_buffers(4, *cells.buffers()[1:])
    datasets.Dataset(arrow.table({"text": text})).save_to_disk(str(tmp_path / "d"))
    rows = list(read_rows(parse_spec(str(tmp_path / "d"))))
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False, True]
    assert [row.source.line for row in rows] == [1, 2, 3, 4]
