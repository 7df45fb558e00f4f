"""A process whose file calls can be struck (`faults.c`): `python -m tests.battery.faulty_saves`.

Every trial is a fork: it saves over what an earlier save left, is killed or refused at its n-th
call, and what is left behind is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tandem.checkpoint.folder import read_facts, write_folder
from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import State, load_newest_state
from tandem.errors import CheckpointError
from tests.whole import is_whole

SAVED, SAVED_ANYWAY, REFUSED, FAILED = 0, 10, 11, 12
Save = Callable[[Path], None]
Check = Callable[[Path], bool]


def state(step: int) -> State:
    """A small one, told by its step."""
    tensors = {
        "actor": {"a": torch.full((50,), float(step))},
        "optimizer": {"n": torch.tensor(step)},
    }
    return State(step, tensors, {"kl_coef": step / 7})


def save_next(folder: Path) -> None:
    """The third checkpoint; the first goes."""
    saver = Saver(folder / "checkpoints", keep=2)
    saver.save(state(3))
    saver.wait()


def loads(folder: Path) -> bool:
    """Whether the second or the third loads, and is right."""
    found, _ = load_newest_state(folder / "checkpoints")
    assert found is not None
    assert found.step in (2, 3), found.step
    assert torch.equal(found.tensors["actor"]["a"].whole(), state(found.step).tensors["actor"]["a"])
    assert found.numbers["kl_coef"] == found.step / 7
    return found.step == 3


def finish_model(folder: Path) -> None:
    """A finished step's folder."""
    from tandem.models.save import save_model
    from tests.models.families import tiny_model, tokenizer

    model = tiny_model("llama")
    write_folder(folder / "sft", lambda aside: save_model(model, tokenizer(), aside), {"n": 3})


def is_there(folder: Path) -> bool:
    """Whether the finished step is there, whole; else it must not be there at all."""
    if not (folder / "sft").exists():
        return False
    assert is_whole(folder / "sft")
    assert read_facts(folder / "sft") == {"n": 3}
    return True


KINDS: dict[str, tuple[Save, Check]] = {
    "checkpoint": (save_next, loads),
    "model": (finish_model, is_there),
}


def trial(faults: ctypes.CDLL, folder: Path, save: Save, number: int, how: int, log: Path) -> int:
    """Save in a fork that is struck at its `number`-th call; its exit code, or minus its signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = FAILED
    try:
        with log.open("w") as file, contextlib.redirect_stderr(file):
            faults.fault_arm(number, how)
            try:
                save(folder)
                code = SAVED if faults.fault_count() < number else SAVED_ANYWAY
            except CheckpointError as error:
                faults.fault_disarm()
                is_clear = "\n" not in str(error) and "bytes free" in str(error)
                code = REFUSED if is_clear else FAILED
            except BaseException:
                faults.fault_disarm()
                traceback.print_exc()
    finally:
        os._exit(code)


def trials(
    faults: ctypes.CDLL, work: Path, kind: str, how: int, stride: int
) -> Iterator[tuple[int, int, bool]]:
    """Strike each stride-th call in turn; (its number, how it ended, whether the new one is there).

    Whatever was there before must be there, and save again afterwards.
    """
    save, check = KINDS[kind]
    if kind == "model":
        save(work / "import")  # what it imports, the forks share
    before = work / "before"
    saver = Saver(before / "checkpoints", keep=2)
    for step in (1, 2):
        saver.save(state(step))
    saver.wait()
    number, code = 1, FAILED
    while code != SAVED:
        folder = work / "now"
        shutil.copytree(before, folder)
        code = trial(faults, folder, save, number, how, work / "log")
        is_new = check(folder)
        if code in (SAVED, SAVED_ANYWAY):
            assert is_new, number
        elif code != (-signal.SIGKILL if how == 0 else REFUSED):
            raise AssertionError(f"call {number}: {code}\n{(work / 'log').read_text()}")
        yield number, code, is_new
        if not is_new or kind == "checkpoint":
            save(folder)  # the same command again
            assert check(folder)
        shutil.rmtree(folder)
        number += stride


def main(arguments: list[str]) -> None:
    """FOLDER KIND ERRNO STRIDE: the trials, summed up as JSON on the last line. FOLDER --order LOG:
    the calls of one save that nothing strikes."""
    if arguments[1] == "--order":
        folder = Path(arguments[0])
        faults = ctypes.CDLL(os.environ["LD_PRELOAD"])
        saver = Saver(folder / "checkpoints", keep=2)
        for step in (1, 2):
            saver.save(state(step))
        saver.wait()
        with Path(arguments[2]).open("wb") as file:
            faults.fault_note(file.fileno())
            save_next(folder)
            faults.fault_note(-1)
        print("saved")
        return
    folder, kind, how, stride = Path(arguments[0]), arguments[1], *map(int, arguments[2:4])
    torch.set_num_threads(1)
    faults = ctypes.CDLL(os.environ["LD_PRELOAD"])
    found = list(trials(faults, folder, kind, how, stride))
    print(
        json.dumps(
            {
                "trials": len(found) - 1,
                "new": sum(is_new for _, code, is_new in found if code != SAVED),
                "saved_anyway": sum(code == SAVED_ANYWAY for _, code, _ in found),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
