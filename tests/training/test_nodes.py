"""Runs over nodes that share no file system: each has a folder of its own for the same run."""

from __future__ import annotations

import resource
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem.checkpoint.folder import CARD, MANIFEST, copy_folder, require_space, write_folder
from tandem.checkpoint.sharing import described, find_folders
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError, TandemError
from tandem.parallel.world import World
from tandem.training.checks import agreement
from tandem.training.checks.agreement import require_one_configuration
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import ran
from tests.training.test_resume_ranks import ran_until, stages


def on_node(config: RunConfig, folders: Sequence[Path], world: World) -> RunConfig:
    """The run as a rank has it: in its node's folder."""
    return replace(config, output_dir=str(folders[world.rank * len(folders) // world.size] / "run"))


def stopped_on(
    world: World, config: RunConfig, folders: Sequence[Path], stage: str, step: int, lines: int
) -> None:
    ran_until(world, on_node(config, folders, world), stage, step, lines)


def ran_on(world: World, config: RunConfig, folders: Sequence[Path]) -> str:
    """What the run said, or the error that it ended by."""
    lines: list[str] = []
    try:
        ran(on_node(config, folders, world), world, lines)
    except TandemError as error:
        return str(error)
    return "\n".join(lines)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Two nodes' disks."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> RunConfig:
    config = tiny_config(
        tmp_path_factory.mktemp("alone") / "run", tiny_model, preferences, stages=["sft", "dpo"],
        save_every=1, sft__max_steps=2, dpo__max_steps=2, ppo__eval_prompts=2,
    )  # fmt: skip
    return replace(config, parallel=stages(3, 3))


@pytest.fixture(scope="module")
def alone(config: RunConfig) -> Path:
    """The run by one process."""
    return ran(config)


@pytest.fixture(scope="module")
def once_stopped(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """Two nodes' disks after a run that was stopped in the second step of its first stage."""
    folder = tmp_path_factory.mktemp("stopped")
    folders = [folder / "a", folder / "b"]
    for node in folders:
        node.mkdir()
    on_ranks(2, stopped_on, config, folders, "sft", 2, 2)
    return folder


@pytest.fixture
def stopped(nodes: list[Path], once_stopped: Path) -> list[Path]:
    """Those disks, for one test."""
    for node in nodes:
        shutil.copytree(once_stopped / node.name, node, dirs_exist_ok=True)
    return nodes


def assert_same_weights(ours: Path, expected: Path) -> None:
    found, wanted = load_file(ours), load_file(expected)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert float((found[name] - weight).abs().mean()) < 1e-5, name


def test_a_run_without_a_shared_file_system_stops_moves_and_ends_as_one_process_does(
    stopped: list[Path], config: RunConfig, alone: Path
) -> None:
    nodes = a, b = stopped
    for number, node in enumerate(nodes, start=1):
        found = sorted(path.name for path in (node / "run/checkpoints/sft").iterdir())
        assert found == ["latest", f"step-000001-part-{number}-of-2"]
        pieces = node / "run/checkpoints/sft" / found[1]
        assert {path.name for path in pieces.iterdir()} == {
            MANIFEST,
            "layout.json",
            f"model-0000{number}-of-00002.safetensors",
            f"model_optimizer-0000{number}-of-00002.safetensors",
        }
    # The nodes come in another order, so that every piece lies on the other one.
    on_ranks(2, stopped_on, replace(config, parallel=stages(1, 1)), [b, a], "dpo", 2, 3)
    assert (a / "run/sft" / MANIFEST).read_bytes() == (b / "run/sft" / MANIFEST).read_bytes()
    replicas = replace(config.parallel, replicas=2)
    said = on_ranks(4, ran_on, replace(config, parallel=replicas), nodes)[0]
    assert "no file system is shared" in said
    assert "is 2 folders (ranks 0-1 on " in said
    assert "dpo: continuing after step 1 (checkpoint verified)" in said
    for node in nodes:
        for step in ("sft", "dpo"):
            name = f"{step}/model.safetensors"
            assert_same_weights(node / "run" / name, alone / name)
        assert not (node / "run/checkpoints/dpo").exists()
        assert not list(node.rglob(".tandem-*"))


def test_parts_go_on_once_they_are_together_and_are_named_where_one_is_missing(
    stopped: list[Path], config: RunConfig, alone: Path
) -> None:
    config = replace(config, stages=("sft",))
    a, b = stopped
    step = "run/checkpoints/sft/step-000001"
    for said in on_ranks(2, ran_on, config, [a]):
        assert (
            "step-000001 must have all 2 parts, one of each node that wrote it; got none of" in said
        )
        assert "part 2 of " in said
        assert "(ranks 1: model-00002-of-00002.safetensors, model_optimizer-00002-of" in said
        assert "step-000001-part-2-of-2 to the same place on one of these." in said
    assert (a / f"{step}-part-1-of-2").is_dir()  # not taken for damaged
    shutil.copytree(b / f"{step}-part-2-of-2", a / f"{step}-part-2-of-2")
    assert "sft: continuing after step 1" in on_ranks(3, ran_on, config, [a])[0]
    assert_same_weights(a / "run/sft/model.safetensors", alone / "sft/model.safetensors")


def test_a_damaged_part_is_not_read(stopped: list[Path], config: RunConfig) -> None:
    config = replace(config, stages=("sft",))
    a, b = stopped
    part = "run/checkpoints/sft/step-000001-part-2-of-2"
    shutil.copytree(b / part, a / part)
    file = a / part / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    said = on_ranks(2, ran_on, config, stopped)[0]
    assert "got another: it changed after it was written. Another node has it whole." in said
    assert "sft: continuing after step 1" in said


def test_nodes_must_have_the_same_rows_and_models(
    tmp_path: Path, nodes: list[Path], config: RunConfig, preferences: str
) -> None:
    other = tmp_path / Path(preferences).name
    other.write_text("\n".join(Path(preferences).read_text().splitlines()[:-2]) + "\n")
    for said in on_ranks(2, ran_on_other_data, config, nodes, str(other)):
        assert "data must be the same rows on every node; got others on" in said
        assert "(rank 1)" in said


def ran_on_other_data(world: World, config: RunConfig, folders: Sequence[Path], other: str) -> str:
    return ran_on(world, replace(config, data=(other,)) if world.rank else config, folders)


def copied(world: World, folders: Sequence[Path], how: str) -> tuple[list[int], str]:
    """How ranks see folders, and what copying a finished one between them ends in."""
    path = folders[world.rank % len(folders)] / "run"
    world = find_folders(path, world)
    folder = path / "sft"
    if how == "differ" or (how and world.rank == len(folders) - 1):
        alone = World()
        write_folder(folder, lambda f: (f / "sub").mkdir() or fill(f, world.rank), {}, world=alone)
        if how == "its file is gone":
            (folder / "sub/x").unlink()
        if how == "its cards are the owner's":
            (folder / CARD).write_text("Longer than it was.")
            (folder / "sub" / CARD).unlink()
    world.barrier()
    try:
        copy_folder(folder, world)
    except TandemError as error:
        return world.folders, str(error)
    return world.folders, described(path, world)


def fill(folder: Path, rank: int) -> None:
    (folder / "sub/x").write_bytes(bytes([rank]) * 100_000)
    (folder / "y").write_bytes(b"")
    (folder / "z").write_bytes(b"z")
    for card in (folder / CARD, folder / "sub" / CARD):
        card.write_text("Made by a run.")


def test_a_finished_folder_comes_to_every_file_system(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    found = on_ranks(4, copied, folders, "last has it")
    assert [keepers for keepers, _ in found] == [[0, 1, 2]] * 4
    assert "ranks 0, 3 on " in found[0][1]
    for folder in folders:
        assert (folder / "run/sft/sub/x").read_bytes() == b"\x02" * 100_000
        assert sorted(p.name for p in (folder / "run").iterdir()) == ["sft"]


def test_a_damaged_folder_is_refused_before_others_wait_for_it(nodes: list[Path]) -> None:
    for _, said in on_ranks(2, copied, nodes, "its file is gone"):
        assert "run/sft/sub/x must have 100000 bytes; got no such file. Bring back" in said
    assert not list(nodes[0].glob("run/*"))


def copied_with_a_bad_disk(
    world: World, folders: Sequence[Path], bad: int
) -> tuple[list[int], str]:
    """Copying from the last node's folder, where one node's disk fails in the middle of a file."""
    opened, opens = Path.open, list[Path]()

    def failing(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        opens.extend([path] if path.name == "x" and mode == "rb" else [])
        if opens.count(path) == 2:  # it was verified before
            raise OSError(5, "Input/output error", str(path))
        return opened(path, mode, *more, **options)

    if world.rank == bad == len(folders) - 1:
        Path.open = failing  # type: ignore[method-assign, assignment]
    elif world.rank == bad:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    return copied(world, folders, "last has it")


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (
            2,
            "c/run/sft/sub/x on HOST must be readable, to be copied to the nodes that lack it; got",
        ),
        (0, "a/run/sft on HOST must be writable; got: File too large ("),
        (1, "b/run/sft on HOST must be writable; got: File too large ("),
    ],
)
def test_a_disk_that_fails_while_a_folder_is_copied_stops_every_rank(
    tmp_path: Path, bad: int, expected: str
) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    for _, said in on_ranks(4, copied_with_a_bad_disk, folders, bad):
        assert said.startswith(f"{tmp_path}/{expected.replace('HOST', socket.gethostname())}")
    assert not list(folders[bad % 2].glob("run/*"))
    assert (folders[2] / "run/sft" / MANIFEST).is_file()


def test_a_card_comes_as_its_owner_has_left_it(nodes: list[Path]) -> None:
    on_ranks(2, copied, nodes, "its cards are the owner's")
    for node in nodes:
        assert (node / "run/sft" / CARD).read_text() == "Longer than it was."
        assert not (node / "run/sft/sub" / CARD).exists()


def test_different_finished_folders_are_not_mixed(nodes: list[Path]) -> None:
    for _, said in on_ranks(2, copied, nodes, "differ"):
        assert "sft must be the same on every node; got 2 that differ" in said


def unwritable(world: World, folder: Path) -> str:
    path = folder / "file/run" if world.rank else folder / "run"
    try:
        find_folders(path, world)
    except TandemError as error:
        return str(error)
    return ""


def test_a_folder_that_a_rank_cannot_write_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in on_ranks(2, unwritable, tmp_path):
        assert said.startswith(f"--output-dir must be a folder that can be written; got {tmp_path}")
        assert "Not a directory" in said


def with_room(world: World, folder: Path) -> str:
    """What is said where the second of two nodes lacks room."""
    try:
        require_space(folder, 10**18 * world.rank, replace(world, keepers=(0, 1)))
    except TandemError as error:
        return str(error)
    return ""


def test_a_full_disk_is_named_with_its_node(tmp_path: Path) -> None:
    said = on_ranks(2, with_room, tmp_path)
    assert said[0] == said[1]
    assert said[0].startswith(f"{tmp_path} on {socket.gethostname()} must have room for 1,000,000")


def test_one_file_system_is_nothing_to_speak_of(tmp_path: Path) -> None:
    found = on_ranks(3, copied, [tmp_path], "")
    assert found == [([0], "")] * 3
    assert list(tmp_path.iterdir()) == []


def ran_with(world: World, configs: Sequence[RunConfig]) -> str:
    """What a run ends by whose ranks were started with these configurations."""
    try:
        ran(configs[world.rank], world)
    except TandemError as error:
        return str(error)
    return "finished"


def test_nodes_with_other_knobs_are_refused_before_anything_is_written(
    config: RunConfig, tmp_path: Path
) -> None:
    """Each rank would update its shard by its own learning rate, and one would be recorded."""
    one = replace(config, output_dir=str(tmp_path / "run"))
    for other, part in (
        (replace(one, sft=replace(one.sft, learning_rate=5e-4)), "sft.learning_rate 0.001 on "),
        (replace(one, stages=("sft",)), 'stages ["sft", "dpo"] on '),
        (replace(one, parallel=stages(3, 1)), "parallel.critic_zero_stage 3 on "),
        (replace(one, dtype="bf16", seed=7), "seed 1234 on "),
    ):
        said = on_ranks(2, ran_with, [one, other])
        assert said[0] == said[1]
        assert said[0].startswith(f"every node must have one configuration; got {part}"), said[0]
        assert "(rank 1)" in said[0]
    assert not (tmp_path / "run").exists()


def compared(world: World, config: RunConfig, package: Path | None, ranks: Sequence[int]) -> str:
    """What the ranks say of each other; the second has another package of Tandem, if there is one,
    and `ranks` of its node."""
    if world.rank == 1 and package is not None:
        agreement._PACKAGE = package
    here = replace(world, ranks_per_node=ranks[world.rank])
    try:
        require_one_configuration(config, here)
    except ConfigError as error:
        return str(error)
    return ""


def test_nodes_with_other_code_are_refused(config: RunConfig, tmp_path: Path) -> None:
    package = tmp_path / "tandem"
    package.mkdir()
    (package / "losses.py").write_text("factor = 2.0")
    assert on_ranks(2, compared, config, None, [1, 1]) == ["", ""]
    said = on_ranks(2, compared, config, package, [1, 1])
    assert said[0] == said[1]
    assert said[0].startswith("every node must run the same code; got Tandem's files ")
    assert said[0].endswith("(rank 1). Install the same versions on each.")


def test_a_loss_of_ones_own_is_the_same_on_every_node(config: RunConfig, tmp_path: Path) -> None:
    configs = []
    for node in "abc":
        (tmp_path / node).mkdir()
        file = tmp_path / node / "mine.py"
        file.write_text(f"def loss(*given):\n    return {'given' if node != 'c' else 'None'}\n")
        configs.append(replace(config, ppo=replace(config.ppo, loss_function=f"{file}:loss")))
    a, b, c = configs
    assert on_ranks(2, compared_with, [a, b]) == ["", ""]
    said = on_ranks(2, compared_with, [a, c])
    assert said[0] == said[1]
    assert said[0].startswith("every node must run the same code; got files of ppo.loss_function ")


def compared_with(world: World, configs: Sequence[RunConfig]) -> str:
    return compared(world, configs[world.rank], None, [1, 1])


def test_nodes_of_unequal_size_are_refused(config: RunConfig) -> None:
    """Of 4 ranks both 1 and 2 make whole nodes, and ranks would form other groups."""
    said = on_ranks(4, compared, config, None, [2, 2, 1, 1])
    assert said[0].startswith("every node must have one configuration; got ranks on a node 2 on ")
    assert " and 1 on " in said[0]
    assert len(set(said)) == 1


def test_nodes_may_keep_the_files_in_other_places(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    copied = shutil.copy(config.data[0], tmp_path / "b")
    model = shutil.copytree(config.actor_model, tmp_path / "b" / Path(config.actor_model).name)
    short = replace(config, stages=("sft",), output_dir=str(tmp_path / "a" / "run"))
    other = replace(
        short, data=(str(copied),), actor_model=str(model), output_dir=str(tmp_path / "b" / "run")
    )
    assert on_ranks(2, ran_with, [short, other]) == ["finished"] * 2
    assert (tmp_path / "a/run/sft" / MANIFEST).is_file()
