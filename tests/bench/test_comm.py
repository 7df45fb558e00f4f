"""The network bench: its namespaces come and go, and what it says adds up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import comm, comm_network
from bench.comm_network import PREFIX, limit, two_nodes, why_not

needs_root = pytest.mark.skipif(bool(why_not()), reason="no root, ip and tc")


def namespaces() -> set[str]:
    """Those of this bench that are there."""
    return {path.name for path in Path("/run/netns").glob(f"{PREFIX}-*")}


def own() -> set[str]:
    return {name for name in namespaces() if f"-{os.getpid()}-" in name}


LISTEN = "import socket; socket.create_server(('0.0.0.0', 5000)).accept()[0].send(b'x')"
ASK = """
import socket, sys, time
for _ in range(100):
    try:
        print(socket.create_connection((sys.argv[1], 5000)).recv(1))
        break
    except OSError:
        time.sleep(0.05)
"""


@needs_root
def test_two_nodes_reach_each_other_at_the_rate_asked_for() -> None:
    with two_nodes() as (first, second):
        assert own() == {first.namespace, second.namespace}
        limit((first, second), 100)
        limit((first, second), 50)
        for node in (first, second):
            show = ["tc", "-n", node.namespace, "qdisc", "show", "dev", node.interface]
            found = subprocess.run(show, capture_output=True, text=True, check=True).stdout
            assert "tbf" in found
            assert "rate 50Mbit" in found
        server = subprocess.Popen(first.command([sys.executable, "-c", LISTEN]))
        ask = second.command([sys.executable, "-c", ASK, first.address])
        answer = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=30)
        assert server.wait(timeout=10) == 0
        assert answer.stdout.strip() == "b'x'"


@needs_root
def test_an_interrupt_leaves_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), two_nodes():
        raise KeyboardInterrupt
    assert not own()


@needs_root
def test_what_a_killed_run_left_is_removed_and_what_runs_is_not() -> None:
    dead, living = f"{PREFIX}-999999999-a", f"{PREFIX}-1-a"
    for name in (dead, living):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with two_nodes():
            assert dead not in namespaces()
            assert living in namespaces()
    finally:
        subprocess.run(["ip", "netns", "del", living], check=True)


@pytest.mark.parametrize("missing", ["root", "tc"])
def test_where_it_cannot_run_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "root":
        monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
        monkeypatch.setattr(comm_network.os, "geteuid", lambda: 1000)
    else:
        monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(SystemExit) as caught:
        comm.main([])
    assert missing in str(caught.value)
    assert "\n" not in str(caught.value)


def test_summary_takes_each_rounds_own_ratio() -> None:
    def rank(inter: int) -> dict[str, Any]:
        counted = {"all_gather": {"count": 1, "sent_bytes": 9, "inter_node_bytes": inter}}
        rounds = {"zero-3": (6.0, 8.0, 30.0), "zero++": (2.0, 4.0, 5.0)}
        return {
            "train": {
                side: {
                    "counted": counted,
                    "rounds": [{"seconds": s, "node_sent_bytes": 10, "loss": 1.0} for s in found],
                }
                for side, found in rounds.items()
            }
        }

    work = comm.CommWork(
        shape={}, sides=("zero-3", "zero++"), train_rounds=3, ppo_rounds=0, rows=2, row_tokens=8,
        num_prompts=1, prompt_tokens=1, max_new_tokens=1, interface="x",
    )  # fmt: skip
    found = comm.summary([rank(1), rank(2), rank(4), rank(8)], work)["train"]["zero++"]
    assert found["median"]["seconds"] == 4.0
    assert found["median"]["tokens_per_second"] == 4.0
    assert found["faster"].median == 3.0
    assert found["counted_inter_node_bytes"] == 3


@pytest.mark.slow
@needs_root
def test_the_bench_runs_and_both_sides_lose_alike() -> None:
    result = comm.main(["--tiny"])
    link = result["links"]["1000"]
    sides = link["train"]
    for before, after in zip(sides["zero-3"]["rounds"], sides["zero++"]["rounds"], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=0.01)
        assert before["node_sent_bytes"] > 5 * after["node_sent_bytes"] > 0
    assert link["ppo"]["zero++"]["median"]["generate_seconds"] > 0
    assert not own()
