"""What many tests use: the optional folder of real data, and tiny models."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

# A GPU would change devices and types of every test: only tests/gpu sees one, by `make test-gpu`.
# torch must not be imported before.
if os.environ.get("TANDEM_TEST_GPU") != "on":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# So is this read: threads that wait give their core to the other workers, as `tandem` has them do.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch
import torch.distributed as dist

from tandem import garbage
from tandem.ops import native
from tests.slow_cases import mark_slow

# A shell starts what it puts into the background with Ctrl-C ignored, and a run keeps to that: the
# tests, and the processes that they start, are to hear it all the same.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(
            _number,
            signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL,
        )


atexit.register(garbage.leave_garbage)
# Collecting makes millions of objects, and nearly all stay.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """From its end on there is garbage."""
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before cases are chosen by their marks."""
    has_some = config.getoption("lf", False) or any("::" in asked for asked in config.args)
    mark_slow(items, are_whole_files=not has_some)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """With the GPU in sight: only the tests that are meant for it."""
    if os.environ.get("TANDEM_TEST_GPU") != "on" or collection_path.suffix != ".py":
        return None
    is_meant = collection_path.parent.name == "gpu" or collection_path.stem.endswith("_gpu")
    return None if is_meant or collection_path.stem == "conftest" else True


@pytest.fixture(autouse=True)
def _seed() -> None:
    if os.environ.get("TANDEM_TEST_GPU") == "on":
        torch.manual_seed(0)
    else:  # without a GPU the other formats the stack for each kind, half a millisecond a test
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """Offloaded weights at one rank make a group; a test's forked ranks must not inherit it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage() -> Iterator[None]:
    """Keep the collector away from what lives as long as the tests: libraries and pytest's items.

    Every stage of every run begins with a full collection, a quarter of a tiny run's time where it
    visits all of these. A run's own freeze and its end would let them in again.
    """
    gc.collect()
    gc.freeze()
    collector = SimpleNamespace(**vars(gc))
    collector.freeze = collector.unfreeze = lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "gc", collector)
        yield


@pytest.fixture(params=["native", "plain"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A test that asks runs on the C++ operations and on plain torch."""
    if request.param == "plain":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(native.why_not())
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads compute, within the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models, named by TANDEM_SHARED or beside the repository."""
    here = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TANDEM_SHARED", here.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no folder of real data (set TANDEM_SHARED)")
    return folder / "data"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M as a Hugging Face folder, named by TANDEM_SMOLLM2."""
    folder = os.environ.get("TANDEM_SMOLLM2")
    if not folder or not (Path(folder) / "config.json").is_file():
        pytest.skip("no SmolLM2-135M (set TANDEM_SMOLLM2 to its folder)")
    return Path(folder)
