"""A save that is killed, or refused, at every single call that changes a file.

And the order of those calls: nothing gets its name before it is on the disk, so that a power cut
finds what a kill would leave.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.battery.figures import record

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled `faults.c`."""
    target = tmp_path_factory.mktemp("faults") / "faults.so"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(target), str(HERE / "faults.c")]
    try:
        subprocess.run([*command, "-ldl", "-lpthread"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler: {error}")
    return target


def run(library: Path, *arguments: str) -> str:
    """What the process says on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.battery.faulty_saves", *arguments],
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "how", "stride"),
    [
        pytest.param("checkpoint", 0, 1, id="a checkpoint, killed"),
        *(
            pytest.param(kind, how, 1, id=f"a {kind}, {how}", marks=pytest.mark.slow)
            for kind in ("checkpoint", "model")
            for how in (0, errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)
            if how or kind == "model"
        ),
    ],
)
def test_the_old_or_the_new_is_there_whichever_call_it_was(
    library: Path, tmp_path: Path, kind: str, how: int, stride: int
) -> None:
    found = json.loads(run(library, str(tmp_path), kind, str(how), str(stride)))
    assert found["trials"] >= 20 // stride
    assert 0 < found["new"] < found["trials"], "both are met with"
    what = "SIGKILL" if how == 0 else errno.errorcode[how]
    record(f"{what} at every call of saving a {kind}", stride=stride, **found, unloadable=0)


def test_nothing_gets_its_name_before_it_is_on_the_disk(library: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    run(library, str(tmp_path / "work"), "--order", str(log))
    calls = [line.split("\t") for line in log.read_text().splitlines()]
    root = str(tmp_path / "work" / "checkpoints")
    unsynced: set[str] = set()
    renamed = 0
    for what, path, to in calls:
        if not path.startswith(root):
            continue
        if what in ("create", "write"):
            unsynced.add(path)
        if what in ("create", "rename", "mkdir"):
            unsynced.add(str(Path(to or path).parent))
        if what == "sync":
            unsynced.discard(path)
        if what == "rename":
            late = {p for p in unsynced if p == path or p.startswith(path + "/")}
            assert not late, f"{path} got its name before {late} were synced"
            renamed += 1
            unsynced = {to + p.removeprefix(path) if p.startswith(path) else p for p in unsynced}
        if what == "unlink" and "/step-" in path:
            assert root not in unsynced, "an older one goes before the new one's name is synced"
    assert renamed == 2, "the folder and the pointer"


def test_the_library_strikes(library: Path) -> None:
    assert ctypes.CDLL(str(library)).fault_count() == 0
