"""Building once, memory in large pages, and what the one-call decoder refuses to read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.ops import dense, native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")

WIDTH, HEADS, INNER, VOCABULARY, POSITIONS = 8, 2, 12, 11, 6


def decoder(*, parts: int = 12, shape: tuple[int, ...] | None = None) -> Any:
    """One layer of two heads of four, random weights; `parts` weights for it."""
    torch.manual_seed(0)
    none, ones = torch.empty(0), torch.ones(WIDTH)

    def packed(outputs: int, inputs: int) -> Tensor:
        return dense.pack_weight(torch.randn(outputs, inputs))

    layer = [ones, packed(3 * WIDTH, WIDTH), none, none, none, packed(WIDTH, WIDTH), none, ones,
             packed(2 * INNER, WIDTH), none, packed(WIDTH, INNER), none]  # fmt: skip
    angles = torch.rand(POSITIONS, WIDTH // HEADS)
    return torch.classes.tandem.LlamaDecoder(
        torch.randn(VOCABULARY, WIDTH),
        angles.cos(),
        angles.sin(),
        [*layer[:parts], ones, packed(VOCABULARY, WIDTH), none],
        [torch.zeros(2, HEADS, WIDTH // HEADS, 16)],
        [torch.zeros(2, HEADS, 16, WIDTH // HEADS)],
        list(shape or (HEADS, HEADS, WIDTH // HEADS, INNER, VOCABULARY)),
        [0],
        1e-5,
        0.5,
    )


def step(made: Any, token: int, position: int) -> Tensor:
    tables = torch.tensor([[1]], dtype=torch.int32)
    logits: Tensor = made.step(torch.tensor([token]), torch.tensor([position]), tables)
    return logits


def test_a_step_reads_the_token_its_position_and_what_came_before() -> None:
    made = decoder()
    first = step(made, 3, 0)
    assert first.shape == (1, VOCABULARY)
    assert bool(first.isfinite().all())
    assert not torch.equal(step(made, 4, 0), first)
    assert torch.equal(step(made, 3, 0), first)
    with_past = step(made, 3, 1)
    assert not torch.equal(with_past, first)
    step(made, 4, 0)  # another past for the same token
    assert not torch.equal(step(made, 3, 1), with_past)


@pytest.mark.parametrize(
    ("token", "position", "message"),
    [
        (VOCABULARY, 0, r"token must be in \[0, 11\); got 11"),
        (-1, 0, r"token must be in \[0, 11\); got -1"),
        (0, POSITIONS, r"position must be in \[0, 6\); got 6"),
    ],
)
def test_what_lies_outside_the_tables_is_refused(token: int, position: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        step(decoder(), token, position)


def test_weights_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(RuntimeError, match="12 weights for each of 1 layers"):
        decoder(parts=11)
    with pytest.raises(RuntimeError, match="must be 5 numbers; got 1"):
        decoder(shape=(2,))
    wrong = decoder(shape=(HEADS, HEADS, WIDTH // HEADS, 40, VOCABULARY))
    with pytest.raises(RuntimeError, match="a packed weight must hold"):
        step(wrong, 0, 0)


@pytest.mark.parametrize("megabytes", [0, 1, 9])
def test_large_pages_leave_what_memory_holds(megabytes: int) -> None:
    held = torch.arange(megabytes * 2**18, dtype=torch.float32)
    views = held, held[1:]  # one of them aligned to nothing
    before = held.clone()
    native.prefer_large_pages(*views)
    assert torch.equal(held, before)


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache, and a compiler that takes a moment; where it has built."""
    builds = []

    def build(compiler: str, flags: list[str], sources: list[Path], folder: Path) -> list[Path]:
        builds.append(folder)
        time.sleep(0.2)  # the others are at the lock by now
        return []

    def link(command: list[str]) -> str:
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_text("a library")
        return ""

    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_compiled", build)
    monkeypatch.setattr(native, "_run", link)
    return builds


def test_processes_that_want_the_library_at_once_build_it_once(builds: list[Path]) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(native._built, ["g++"] * 4))
    assert len(builds) == 1
    assert len(set(made)) == 1
    assert made[0].read_text() == "a library"
    assert native._kept() == made[0]


@pytest.mark.parametrize("left", [0, 4])
def test_half_a_library_is_built_anew(builds: list[Path], left: int) -> None:
    library = native._built("g++")
    library.write_bytes(library.read_bytes()[:left])
    assert native._kept() is None
    assert native._built("g++") == library
    assert native._kept() == library
    assert len(builds) == 2


def test_a_library_that_is_there_needs_no_compiler(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_compiler", lambda: None)
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert "no C++ compiler was found" in native.why_not.__wrapped__()
    library = native._built("g++")
    assert native.why_not.__wrapped__() == ""
    assert loaded == [str(library)]
