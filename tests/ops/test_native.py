"""Building once, memory in large pages, and what the one-call decoder refuses to read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from tandem import processor
from tandem.ops import dense, native
from tandem.ops.blockwise import NF4, quantize

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")

WIDTH, HEADS, INNER, VOCABULARY, POSITIONS = 8, 2, 12, 11, 6


def decoder(
    *,
    parts: int = 23,
    shape: tuple[int, ...] | None = None,
    adapters: list[Tensor] | None = None,
    blocks: int = 2,
    positions: int = POSITIONS,
    stored: Sequence[Tensor] = (),
) -> Any:
    """One layer of two heads of four, random weights; `parts` weights for it. stored: codes and
    scales of NF4, which then stand for what is packed."""
    torch.manual_seed(0)
    none, ones = torch.empty(0), torch.ones(WIDTH)

    def packed(outputs: int, inputs: int) -> Tensor:
        return none if stored else dense.pack_weight(torch.randn(outputs, inputs))

    layer = [ones, packed(3 * WIDTH, WIDTH), none, none, none, packed(WIDTH, WIDTH), none, ones,
             packed(2 * INNER, WIDTH), none, packed(WIDTH, INNER), none,
             *(adapters or [none] * 11)]  # fmt: skip
    angles = torch.rand(positions, WIDTH // HEADS)
    return torch.classes.tandem.LlamaDecoder(
        torch.randn(VOCABULARY, WIDTH),
        angles.cos(),
        angles.sin(),
        [*layer[:parts], ones, packed(VOCABULARY, WIDTH), none],
        [torch.zeros(blocks, HEADS, WIDTH // HEADS, 16)],
        [torch.zeros(blocks, HEADS, 16, WIDTH // HEADS)],
        list(shape or (HEADS, HEADS, WIDTH // HEADS, INNER, VOCABULARY, 1)),
        [0],
        1e-5,
        0.5,
        2.0,
        [*stored],
        [NF4.number, NF4.block] if stored else [],
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
    with pytest.raises(RuntimeError, match="23 weights for each of 1 layers"):
        decoder(parts=22)
    with pytest.raises(RuntimeError, match="must be 6 numbers; got 1"):
        decoder(shape=(2,))
    wrong = decoder(shape=(HEADS, HEADS, WIDTH // HEADS, 40, VOCABULARY, 1))
    with pytest.raises(RuntimeError, match="a packed weight must hold"):
        step(wrong, 0, 0)


def test_codes_that_do_not_fit_the_shape_are_refused() -> None:
    shapes = [*[(WIDTH, WIDTH)] * 4, *[(INNER, WIDTH)] * 2, (WIDTH, INNER), (VOCABULARY, WIDTH)]
    stored = [part for shape in shapes for part in quantize(torch.ones(shape).view(-1), NF4)]
    assert step(decoder(stored=stored), 0, 0).shape == (1, VOCABULARY)
    with pytest.raises(RuntimeError, match="codes and scales of 8 weights"):
        decoder(stored=stored[2:])
    with pytest.raises(RuntimeError, match=rf"\({WIDTH}, {WIDTH}\) must have 32 bytes of codes"):
        decoder(stored=[stored[0][1:], *stored[1:]])
    with pytest.raises(RuntimeError, match="contiguous uint8 and float32 or bfloat16 scales"):
        decoder(stored=[stored[0].int(), *stored[1:]])
    none = torch.empty(0)
    with pytest.raises(RuntimeError, match="weight 0 must be packed or codes; got neither"):
        step(decoder(stored=[none.byte(), none, *stored[2:]]), 0, 0)


@pytest.mark.parametrize("part", ["A", "B"])
def test_adapters_that_do_not_fit_are_refused(part: str) -> None:
    """Of two adapters of rank 1 the first alone is there; a part of it has too many numbers."""
    none = torch.empty(0)
    large = dense.pack_weight(torch.ones(40, 40))
    down = dense.pack_weight(torch.ones(1, WIDTH))
    pair = [large, dense.pack_weight(torch.ones(INNER, 1))] if part == "A" else [down, large]
    wrong = decoder(adapters=[*[none] * 6, *pair, none, none, none])
    with pytest.raises(RuntimeError, match=f"packed {part} must hold"):
        step(wrong, 0, 0)


def test_memory_and_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"LlamaDecoder must get memory \(blocks, Hkv, Dk, 16\)"):
        decoder(shape=(HEADS, 1, WIDTH // HEADS, INNER, VOCABULARY, 1))
    one, first = torch.tensor([3]), torch.tensor([0])
    for tables, message in (
        ([[2]], "must get blocks below 2; got 2 in row 0"),
        ([[1], [1]], "a table row for each"),
        ([[]], "must get a block for each of row 0's 1 tokens; got 0 blocks"),
    ):
        with pytest.raises(RuntimeError, match=message):
            decoder().step(one, first, torch.tensor(tables, dtype=torch.int32))


COLUMNS = 6  # key, limit, token, position, number, place


def rows_to_advance(limits: list[int]) -> tuple[Tensor, Tensor]:
    n = len(limits)
    columns = torch.zeros(COLUMNS, n + 2, dtype=torch.long)  # two slots stay free
    columns[0, :n] = torch.arange(n) * 77 + 1
    columns[1, :n] = torch.tensor(limits)
    columns[2, :n] = torch.arange(n) % VOCABULARY
    columns[4, :n] = 1
    columns[5, :n] = torch.arange(n) * 100 + 1
    return columns, torch.arange(n, dtype=torch.int32)[:, None].repeat(1, 2)


def one_by_one(
    made: Any,
    columns: Tensor,
    tables: Tensor,
    n: int,
    stops: list[int],
    banned: list[int],
    least: int,
    num_ids: int,
    most: int,
    until: int,
) -> tuple[list[tuple[int, ...]], list[tuple[int, int, bool]], list[int]]:
    """What `advance` does, a row and a step at a time."""
    rows = [(i, columns[:, i].clone(), tables[i : i + 1]) for i in range(n)]
    draws: list[tuple[int, ...]] = []
    ended: list[tuple[int, int, bool]] = []
    for number in range(1, most + 1):
        left = []
        for row, numbers, table in rows:
            key, limit, token, position, drawn_before, place = numbers.tolist()
            logits = made.step(torch.tensor([token]), torch.tensor([position]), table)
            allowed = logits.clone()
            if drawn_before < least:
                allowed[:, banned] = -torch.inf
            allowed[:, num_ids:] = -torch.inf
            drawn, _, sampled, _ = dense.sample(
                allowed, torch.tensor([key]), torch.tensor([drawn_before]), 1.5
            )
            of_all = [float(number) for number in dense.token_logprobs(logits, drawn, 1.5)]
            draws.append((token, place, int(drawn), of_all[0], float(sampled), of_all[1]))
            numbers[2] = drawn
            numbers[3:] += 1
            stopped = int(drawn) in stops
            if stopped or drawn_before + 1 >= limit:
                ended.append((row, number, stopped))
            else:
                left.append((row, numbers, table))
        some = len(left) < len(rows)
        rows = left
        if not rows or (some and len(rows) <= until):
            break
    return draws, ended, [row for row, _, _ in rows]


def test_no_clock_is_read_for_what_changes_bits() -> None:
    """Ranks, and a run before and after a stop, must choose the same arithmetic on a busy machine.

    `tuning` chooses between ways of the same bits; `threads` measures loops for a bench.
    """
    clocks = re.compile(r"_clock\b|\bclock_|\bclock\(|rdtsc|gettimeofday|\btime\(")
    read = {file.stem for file in native.SOURCES.iterdir() if clocks.search(file.read_text())}
    assert read == {"tuning", "threads"}


@pytest.mark.parametrize("most", [1, 3, 50])
@pytest.mark.parametrize("until", [0, 3, 9])
@pytest.mark.parametrize(("stops", "banned", "least"), [([], [], 0), ([3, 7], [], 0),
                                                       ([3, 7], [3, 7, 0], 4)])  # fmt: skip
@pytest.mark.parametrize("num_ids", [VOCABULARY - 2, VOCABULARY, VOCABULARY + 5])
def test_many_steps_are_single_steps_one_after_another(
    most: int, until: int, stops: list[int], banned: list[int], least: int, num_ids: int
) -> None:
    limits = [6, 2, 4, 6, 3, 6, 2, 5]
    n = len(limits)
    made = decoder(blocks=n, positions=8)
    columns, tables = rows_to_advance(limits)
    steps, ids, numbers, ended, live = made.advance(
        columns[:, :n], tables, stops, banned, least, 1.5, num_ids, most, until
    )
    again = decoder(blocks=n, positions=8)
    before, tables_before = rows_to_advance(limits)
    draws, ends, left = one_by_one(
        again, before, tables_before, n, stops, banned, least, num_ids, most, until
    )
    assert max(token for _, _, token, *_ in draws) < num_ids
    ours = list(zip(*ids.tolist(), *numbers.tolist(), strict=True))
    assert sorted(ours) == sorted(draws)
    assert sorted(map(tuple, ended.tolist())) == sorted(ends)
    assert sorted(live.tolist()) == left
    assert steps == max(place % 100 for _, place, *_ in draws)
    for place, was in enumerate(live.tolist()):  # the rows that are left stand in front
        assert columns[0, place] == before[0, was]
        assert tables[place, 0] == was
        assert columns[4, place] == 1 + steps
    untouched = columns[:, n:]
    assert not untouched.any()


def test_advancing_refuses_columns_that_do_not_fit() -> None:
    made = decoder()
    columns, tables = rows_to_advance([3, 3])
    for wrong in (columns[:5, :2], columns[:, :1], columns[:, :2].int()):
        with pytest.raises(RuntimeError, match="advance must get 6 int64 numbers of each row"):
            made.advance(wrong, tables, [], [], 0, 1.0, VOCABULARY, 4, 0)
    with pytest.raises(RuntimeError, match=r"a banned token must be in \[0, 11\); got 11"):
        made.advance(columns[:, :2], tables, [], [VOCABULARY], 2, 1.0, VOCABULARY, 4, 0)
    with pytest.raises(RuntimeError, match="num_ids must be above 0; got 0"):
        made.advance(columns[:, :2], tables, [], [], 0, 1.0, 0, 4, 0)
    columns[2, 1] = VOCABULARY
    with pytest.raises(RuntimeError, match="a token must be in"):
        made.advance(columns[:, :2], tables, [], [], 0, 1.0, VOCABULARY, 4, 0)


@pytest.mark.parametrize("megabytes", [0, 1, 9])
def test_large_pages_leave_what_memory_holds(megabytes: int) -> None:
    held = torch.arange(megabytes * 2**18, dtype=torch.float32)
    views = held, held[1:]  # one of them aligned to nothing
    before = held.clone()
    native.prefer_large_pages(*views)
    assert torch.equal(held, before)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux lists them")
def test_loops_run_on_as_many_threads_as_torchs(threads: Callable[[int], None]) -> None:
    def running() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = running()
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    alone = dense.linear(x, x)
    threads(before + 2)
    together = dense.linear(x, x)
    assert running() >= before + 2
    assert torch.equal(alone, together)


Commands = list[list[str]]


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Commands]:
    """An empty cache, and a compiler that takes a moment; what it was asked to compile."""
    builds: list[Commands] = []

    def run(commands: Commands) -> str:
        if "-shared" in commands[0]:
            Path(commands[0][commands[0].index("-o") + 1]).write_text("a library")
        else:
            builds.append(commands)
            time.sleep(0.2)  # the others are at the lock by now
        return ""

    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(native, "_run", run)
    return builds


def test_processes_that_want_the_library_at_once_build_it_once(
    builds: list[Commands], capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(native._built, ["g++"] * 4))
    assert len(builds) == 1
    assert len(set(made)) == 1
    assert made[0].read_text() == "a library"
    assert native.kept_library() == made[0]
    said = capsys.readouterr().err
    assert said.count("tandem: building the C++ operations, once for this machine, about") == 1
    assert said.count(" done in 0 s\n") == 1
    assert said.count("another process builds the C++ operations; waiting for it ...\n") == 3


def test_every_source_is_in_one_unit_that_is_compiled(builds: list[Commands]) -> None:
    native._built("g++")
    units = [Path(command[command.index("-c") + 1]) for command in builds[0]]
    assert all(unit.is_file() for unit in units)
    texts = [unit.read_text() for unit in units]
    for source in native.SOURCES.glob("*.cpp"):
        included = sum(f'#include "{source.name}"' in text for text in texts)
        assert included + units.count(source) == 1, source.name


@pytest.mark.parametrize(
    ("version", "about", "is_told"),
    [
        ("2.11.0+cpu", "Ubuntu clang version 18.1.3", True),
        ("2.11.0", "Apple clang version 17.0.0 (clang-1700.0.13.3)", True),
        ("2.11.0", "Apple clang version 16.0.0 (clang-1600.0.26.6)", False),
        ("2.11.0", "g++ (Debian 12.2.0-14) 12.2.0", False),
        ("2.12.0", "clang version 22.1.8", False),
    ],
)
def test_clang_is_told_by_which_names_torch_2_11_calls_its_functions(
    version: str,
    about: str,
    is_told: bool,
    builds: list[Commands],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho '{about}'\n")
    compiler.chmod(0o700)
    native._built(str(compiler))
    assert all(("-fclang-abi-compat=17" in command) == is_told for command in builds[0])


@pytest.mark.parametrize("left", [0, 4])
def test_half_a_library_is_built_anew(builds: list[Commands], left: int) -> None:
    library = native._built("g++")
    library.write_bytes(library.read_bytes()[:left])
    assert native.kept_library() is None
    assert native._built("g++") == library
    assert native.kept_library() == library
    assert len(builds) == 2


def test_what_a_killed_builder_left_is_removed(builds: list[Commands], tmp_path: Path) -> None:
    left, other = (tmp_path / f"build-{name}-x" for name in (f"native-{native._key()}", "native-0"))
    for folder in (left, other):
        folder.mkdir()
        (folder / "gemm.cpp.o").write_text("half")
    native._built("g++")
    assert not left.exists()
    assert other.exists(), "another build's folder may be in use"


def test_a_library_that_is_there_needs_no_compiler(
    builds: list[Commands], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "_compiler", lambda: None)
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert "no C++ compiler was found" in native.why_not.__wrapped__()
    (line,) = capsys.readouterr().err.splitlines()
    assert "install g++ or clang++" in line
    assert line.endswith("plain torch runs instead: slower, and the same to rounding rather than "
                         "to the bit.")  # fmt: skip
    library = native._built("g++")
    capsys.readouterr()
    assert native.why_not.__wrapped__() == ""
    assert loaded == [str(library)]
    assert capsys.readouterr().err == ""


def test_a_library_that_does_not_load_is_named(
    builds: list[Commands], capsys: pytest.CaptureFixture[str]
) -> None:
    library = native._built("g++")  # of text
    capsys.readouterr()
    reason = native.why_not.__wrapped__()
    assert reason.startswith(f"the C++ operations were built but do not load: {library}: ")
    assert reason.endswith(f"or remove {library} and set CXX to another compiler)")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tandem: {reason}; plain torch runs instead")
    assert library.is_file()


# ---- a compiler that fails, and folders that cannot be written ----


def compiler(folder: Path, script: str) -> str:
    """A program in the compiler's place, which notes that it ran."""
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\necho ran >> {folder}/runs\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE", str(cache))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return cache


def test_a_failed_build_is_told_in_one_line_with_its_log(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    script = "echo 'In file included from here'; echo 'vec.h:1: error: what is this' >&2; exit 1"
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    reason = native.why_not.__wrapped__()
    (log,) = empty_cache.glob("native-*.log")
    assert reason == f"the C++ operations did not build: vec.h:1: error: what is this ({log})"
    progress, line = capsys.readouterr().err.splitlines()
    assert re.search(r"failed after \d+ s$", progress)
    assert line.startswith(f"tandem: {reason}; plain torch runs instead")
    assert "In file included from here" in log.read_text()
    assert not list(empty_cache.glob("build-*")) + list(empty_cache.glob("*.so"))


def test_no_build_begins_where_its_library_has_no_room(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    reason = native.why_not.__wrapped__()
    assert f"did not build: {empty_cache} must have room for " in reason
    assert "got 4,096 bytes free (free some, or set TANDEM_CACHE" in reason
    assert not (tmp_path / "runs").exists()


def test_a_compiler_that_is_killed_is_told_with_its_signal(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "kill -9 $$"))
    assert "did not build: ended by signal 9, without a word (" in native.why_not.__wrapped__()


def test_a_named_compiler_that_is_not_there_is_told(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = compiler(tmp_path, "echo error: no; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CXX", "clang++-99 \x1b[2J")
    assert "did not build: error: no (" in native.why_not.__wrapped__()
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        f"tandem: CXX names 'clang++-99 \\x1b[2J', which is no command here; {other} builds."
    )


def test_processes_that_waited_for_a_failed_build_do_not_repeat_it(
    empty_cache: Path, tmp_path: Path
) -> None:
    failing = compiler(tmp_path, "sleep 0.5; echo error: no; exit 1")

    def build(_: int) -> str:
        with pytest.raises(RuntimeError) as error:
            native._built(failing)
        return str(error.value)

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(build, range(3)))) == 1
    assert (tmp_path / "runs").read_text().count("ran") == len(native.UNITS)


def test_a_killed_builder_leaves_no_lock(empty_cache: Path, tmp_path: Path) -> None:
    slow = compiler(tmp_path, "exec sleep 60")
    code = f"from tandem.ops import native; native._built({slow!r})"
    builder = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "runs").exists():
        assert time.monotonic() < deadline
        assert builder.poll() is None
        time.sleep(0.05)
    builder.kill()
    builder.wait()
    other = tmp_path / "other"  # the first may be about to run once more, and not to be written
    other.mkdir()
    with pytest.raises(RuntimeError, match="error: no"):
        native._built(compiler(other, "echo error: no; exit 1"))
    assert not list(empty_cache.glob("build-*"))


@pytest.mark.parametrize("where", ["a file in its place", "no home"])
def test_without_a_folder_to_keep_it_there_is_one_line(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "no home":
        for name in ("TANDEM_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file" / "cache"))
    reason = native.why_not.__wrapped__()
    assert reason.startswith("the C++ operations did not build: ")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tandem: {reason}; plain torch runs instead")


def test_of_a_nodes_ranks_the_first_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, said in (("0", "tandem: once\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        native.print_line("once\n")
        assert capsys.readouterr().err == said


def test_a_named_processor_has_its_own_library(
    builds: list[Commands], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {native._built("g++")}
    monkeypatch.setenv("TANDEM_MARCH", "x86-64-v3 -mno-avx512bf16")
    made.add(native._built("g++"))
    assert len(made) == 2
    assert all(c[c.index("-march=x86-64-v3") + 1] == "-mno-avx512bf16" for c in builds[1])
    monkeypatch.setattr(processor, "description", lambda: "another")
    assert native.kept_library() in made, "who runs it does not matter where the processor is named"
    monkeypatch.delenv("TANDEM_MARCH")
    assert native.kept_library() is None
