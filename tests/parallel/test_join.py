"""Ranks that an environment names, as torchrun and schedulers set it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench.ports import free_port
from tandem.errors import ConfigError
from tandem.parallel.world import join

NAMES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "named",
    [
        "2",
        "2 0",
        "2 0 127.0.0.1",
        "2 2 127.0.0.1 29500",
        "2 first 127.0.0.1 29500",
        "two 0 127.0.0.1 29500",
        "2 0 127.0.0.1 port",
    ],
)
def test_an_environment_that_names_ranks_by_half_is_one_line(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(NAMES, named.split(), strict=False):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        join(CPU)
    said = str(raised.value)
    assert said.startswith("the environment must name the ranks, which of them this is, and where")
    assert f"WORLD_SIZE={named.split()[0]}, RANK=" in said
    assert "\n" not in said


def test_a_world_of_one_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("", "1"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert join(CPU).size == 1


@pytest.mark.parametrize("here", ["0", "two", "3"])
def test_ranks_of_a_node_that_are_no_part_of_all_are_one_line(
    here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(NAMES, ("2", "0", "127.0.0.1", "29500", here), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"must divide the ranks; got {here} of 2"):
        join(CPU)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_nobody_meets_says_where(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    # A batch script may export the last one from a variable that is not set.
    for name, value in zip(NAMES, ("2", str(rank), "127.0.0.1", str(port), ""), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        join(CPU, timeout_minutes=0.02)
    said = str(raised.value)
    assert said.startswith("all 2 ranks must meet at MASTER_ADDR:MASTER_PORT within parallel.")
    assert f"got 127.0.0.1:{port} and " in said
    assert "\n" not in said
    assert not dist.is_initialized()
