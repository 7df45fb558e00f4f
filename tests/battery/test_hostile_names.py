"""Hostile names and paths in every argument that takes one: refused in one line, or contained.

Nothing may be made, run or reached because of a name; a message shows it, and never acts it out.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tandem.cli import main
from tandem.config.load import build_config, check_config
from tandem.errors import TandemError
from tandem.training.run_folder import Run
from tests.battery.figures import record

_PLAIN = (
    "", " ", ".", "..", "../x", "../../../../etc/passwd", "/etc/passwd", "/dev/null", "/dev/zero",
    "/dev/fd/99", "/proc/self/mem", "/proc/self/x", "/sys/kernel/x", "~nobody_here/x", "~", "-x",
    "--", "-", "--help-me", "--output-dir", "file", "file/x", "file.jsonl/x", "loop", "loop/x",
    "dangling", "dangling/x", "pipe", "pipe.jsonl", "folder.jsonl", "noread.jsonl", "a/b/c/d",
    "CON", "NUL", "aux.txt", "a:b", "C:\\x", "\\\\host\\share", "...", ".hidden", "None", "null",
    "true", "0", "1e9", "nan", "=", "a=b", "a,b", "a@b", "a#b", "a%00b", "%2e%2e%2f", "%s%n%p",
    "http://localhost/x", "file:///etc/passwd", "s3://b/x", "hf://x/y", "data:text/plain,x",
    "::", ":", ":1", "x:nan", "x:inf", "x:-1", "x:1e999", "::prompt=q", "x::prompt=", "x::a=b",
    "x::prompt=a,prompt=b", "!!python/object/apply:os.system [x]", "&a", "*a", "[1,2]", "{a: b}",
    "{0.__class__}", "{{7*7}}", "<script>", "json", "csv", "text", "parquet", "imagefolder",
)  # fmt: skip
_SHELL = (
    "; touch pwned", "$(touch pwned)", "`touch pwned`", "| touch pwned", "&& touch pwned",
    "> pwned", "< pwned", "a; touch pwned #", "'; touch pwned; '", '"; touch pwned; "', "*", "?",
    "[a-z]", "~+", "!!", "$HOME", "${IFS}", "a b", "'", '"', "\\", "a\\", "#", "&", "%PATH%",
    "os:system", "os.py:system", "subprocess:run",
)  # fmt: skip
_CONTROL = (
    "a\0b", "\0", "a\nb", "\n", "\r", "a\rb", "\t", "\x0b", "\x08", "\x7f", "\x85", "\x9b2J",
    "\x1b[31mred", "\x1b]52;c;aGk=\x07", "\x1b]0;t\x07", "\u202egpj.exe", "\u2066x", "\u200b",
    "\u2028", "\ufeff", "\ud800", "\udcff", "x\udcff.jsonl", "\U000e0041", "\x1b", "a\x1bcb",
)  # fmt: skip
_LONG = (
    "x" * 256,
    "x" * 5000,
    "a/" * 3000,
    "é" * 200,
    "🙂" * 100,
    "../" * 2000,
    "x" * 300 + ".jsonl",
)
_LOOKALIKE = ("e\u0301", "é", "ﬁle", "file．jsonl", "‥/x", "․․/x", "∕etc∕passwd", "日本語", "🙂",
              "ＣＯＮ", "a\u00a0b", "İ", "ß", "Ａ")  # fmt: skip
NAMES = (*_PLAIN, *_SHELL, *_CONTROL, *_LONG, *_LOOKALIKE)
_COMMANDS = (
    ("train", "--data", "file.jsonl", "--output-dir", "o", "--actor-model", "NAME"),
    ("train", "--actor-model", "none/here/at/all", "--output-dir", "o", "--data", "NAME"),
    ("train", "--config", "NAME"),
    ("ppo", "--actor-model", "none/here/at/all", "--data", "file.jsonl", "--output-dir", "o",
     "--reward-function", "NAME"),
    ("data", "check", "NAME"),
    ("data", "check", "file.jsonl", "--tokenizer", "NAME"),
    ("data", "check", "file.jsonl", "--columns", "NAME"),
    ("chat", "NAME"),
    ("chat", "file", "--model", "NAME"),
    ("report", "NAME"),
    ("eval", "NAME"),
    ("NAME",),
)  # fmt: skip
_SHORT = 25
_ROOM_BYTES = 8 * 2**30


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with things in it that are not what their names say."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("x")
    (here / "file.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (here / "folder.jsonl").mkdir()
    (here / "loop").symlink_to("loop")
    (here / "dangling").symlink_to("/nowhere/x")
    os.mkfifo(here / "pipe")
    os.mkfifo(here / "pipe.jsonl")
    monkeypatch.chdir(here)
    cache = Path.home() / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", str(cache)))
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    room = pages * resource.getpagesize() + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))  # what reads /dev/zero ends soon
    yield here
    resource.setrlimit(resource.RLIMIT_AS, limits)


def _files(sandbox: Path) -> set[str]:
    return {str(path) for path in sandbox.parent.rglob("*")}


def _run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """One command; asserts that it ends soon, in one harmless line if it is refused."""
    start = time.process_time()
    code = main(arguments)
    shown = capsys.readouterr()
    assert code in (0, 1, 2), arguments
    assert time.process_time() - start < 60, arguments
    if code == 2:
        *doing, problem, end = shown.err.split("\n")
        assert not end
        assert all(line.endswith(" ...") for line in doing), shown.err
        assert all(line.isprintable() for line in (*doing, problem)), repr(shown.err)
        assert problem.startswith("tandem: ")
        assert len(shown.err) < 14_000
    raw = re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown.out
    )
    assert raw is None, (arguments, raw)
    return code


def _battery(
    names: Iterator[str], sandbox: Path, capsys: pytest.CaptureFixture[str]
) -> Counter[int]:
    codes: Counter[int] = Counter()
    before = _files(sandbox)
    for name in names:
        for command in _COMMANDS:
            arguments = [name if word == "NAME" else word for word in command]
            try:
                codes[_run(arguments, capsys)] += 1
            except BaseException as error:
                error.add_note(f"tandem {arguments!r:.300}")
                raise
        assert _files(sandbox) == before, f"{name!r:.100} made files"
    return codes


@pytest.mark.filterwarnings("ignore")
def test_hostile_names_in_short(sandbox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = _battery(iter(NAMES[:: len(NAMES) // _SHORT]), sandbox, capsys)
    assert codes[2] > codes.total() * 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hostile_names(sandbox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [f"{a}{b}" for a in _CONTROL[2:14] for b in _SHELL[:4]]
    names = [*NAMES, *more]
    assert len(names) >= 200
    codes = _battery(iter(names), sandbox, capsys)
    with capsys.disabled():
        record("hostile names", names=len(names), arguments=len(_COMMANDS),
               **{f"code_{code}": count for code, count in codes.items()})  # fmt: skip


_LEAVES_THE_SANDBOX = re.compile(r"\s*(/|\.|~$)|\s*$|\./")


@pytest.mark.parametrize("name", [n for n in NAMES if not _LEAVES_THE_SANDBOX.match(n)])
def test_a_hostile_output_dir(name: str, sandbox: Path) -> None:
    before = _files(sandbox)
    try:
        config = build_config({"actor_model": "m", "data": ["d"], "output_dir": name}, where="")
        check_config(config)
        run = Run(config, print_line=lambda line: None)
        run.open("tandem train")
        run.close()
    except TandemError as error:
        _assert_one_line(error)
        assert _files(sandbox) == before
    else:
        made = _files(sandbox) - before
        assert str(sandbox / name / "config.yaml") in made
        assert (sandbox / "file").read_text() == "x"
        assert not list(sandbox.rglob("pwned"))


def _assert_one_line(error: TandemError) -> None:
    message = str(error)
    assert message.isprintable(), repr(message)
    assert "output" in message
