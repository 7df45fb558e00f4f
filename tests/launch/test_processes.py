"""Launchers as processes of their own: killed ones, several nodes, starting again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.ports import free_port
from tandem.errors import ConfigError
from tandem.launch.flags import LaunchOptions
from tandem.launch.run import launch
from tests.launch.links import Link
from tests.launch.programs import (
    EXCHANGES,
    PLAIN,
    is_alive,
    listens,
    pids,
    start_launcher,
    wait_for,
)
from tests.tiny import save_tiny_model
from tests.whole import is_whole


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, EXCHANGES, "waits", "--num-gpus", "2")
    ranks = pids(tmp_path, 2)
    os.kill(ranks[1], signal.SIGSTOP)  # not even a stopped one
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("well", 0, ""),
        ("killed", 137, "was killed by SIGKILL"),
        ("hangs", 1, "for rank 1, which has not responded for"),
    ],
)
def test_two_launchers_are_two_nodes(tmp_path: Path, how: str, code: int, line: str) -> None:
    flags = ("--num-nodes", "2", "--num-gpus", "1", "--rdzv", f"127.0.0.1:{free_port()}")
    launchers = [start_launcher(tmp_path, EXCHANGES, how, *flags) for _ in range(2)]
    texts = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [code, code]
    assert "total 2" in "".join(texts)
    assert all(line in text for text in texts), texts
    assert all("Traceback" not in text for text in texts)


def test_a_node_without_rank_0_says_that_it_has_finished(tmp_path: Path) -> None:
    flags = ("--num-nodes", "2", "--num-gpus", "1", "--rdzv", f"127.0.0.1:{free_port()}")
    launchers = [start_launcher(tmp_path, PLAIN, "well", *flags) for _ in range(2)]
    lines = [launcher.communicate(timeout=120)[0].splitlines() for launcher in launchers]
    host = socket.gethostname()
    said = [line for text in lines for line in text if "finished" in line]
    assert said == [f"tandem: node 1 of 2, {host}: finished"]
    assert sum(text[-1] in said for text in lines) == 1


@pytest.mark.slow
def test_a_signal_to_one_node_stops_all(tmp_path: Path) -> None:
    flags = ("--num-nodes", "2", "--num-gpus", "1", "--rdzv", f"127.0.0.1:{free_port()}")
    launchers = [start_launcher(tmp_path, EXCHANGES, "waits", *flags) for _ in range(2)]
    ranks = pids(tmp_path, 2)
    launchers[0].terminate()
    texts = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [143, 143], texts
    assert all("stopped by SIGTERM" in text for text in texts)
    assert not any(is_alive(pid) for pid in ranks)


def test_one_signal_to_every_node_lets_ranks_save(tmp_path: Path) -> None:
    """A job's signal comes to one node a little later than from another."""
    flags = ("--num-nodes", "2", "--num-gpus", "1", "--rdzv", f"127.0.0.1:{free_port()}")
    launchers = [start_launcher(tmp_path, PLAIN, "saves", *flags) for _ in range(2)]
    pids(tmp_path, 2)
    launchers[0].terminate()
    wait_for(lambda: len(list(tmp_path.glob("asked-*"))) == 2)
    launchers[1].terminate()
    time.sleep(0.5)  # long enough for a launcher to end its rank, if it would
    (tmp_path / "may-end").touch()
    texts = [launcher.communicate(timeout=60)[0] for launcher in launchers]
    assert len(list(tmp_path.glob("saved-*"))) == 2, texts


def test_a_node_that_loses_the_meeting_says_what_to_do(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--num-nodes", "2", "--num-gpus", "1", "--rdzv", f"127.0.0.1:{port}")
    keeper = start_launcher(tmp_path, PLAIN, "sleeps", *flags)
    try:
        wait_for(lambda: listens(port))
        other = start_launcher(tmp_path, PLAIN, "sleeps", *flags)
        pids(tmp_path, 2)
    finally:
        keeper.kill()
    text = other.communicate(timeout=60)[0]
    assert other.returncode == 1
    assert "the launcher that keeps the meeting at 127.0.0.1:" in text
    assert text.rstrip().endswith("it continues from the last checkpoint.")
    assert "inner exception" not in text
    keeper.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_all_ranks_start_again_and_go_on(tmp_path: Path, nodes: int) -> None:
    flags = ["--num-gpus", str(2 // nodes), "--max-restarts", "1"]
    if nodes == 2:
        flags += ["--num-nodes", "2", "--rdzv", f"127.0.0.1:{free_port()}"]
    launchers = [start_launcher(tmp_path, EXCHANGES, "killed", *flags) for _ in range(nodes)]
    text = "".join(launcher.communicate(timeout=120)[0] for launcher in launchers)
    assert [launcher.returncode for launcher in launchers] == [0] * nodes, text
    assert "total 2, begun False" in text
    assert "killed by SIGKILL" in text
    assert "All ranks start again (1 of 1)." in text
    assert "total 2, begun True" in text


@pytest.mark.slow
def test_nobody_at_the_meeting_place_is_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match="where no launcher answered for 1 s"):
        launch(
            ["x.py"],
            LaunchOptions(num_gpus=1, num_nodes=2, rdzv=("192.0.2.1", 9), local_addr="127.0.0.1"),
            log_folder=tmp_path,
            device="cpu",
            join_seconds=1,
            print_line=said.append,
        )
    assert said[-1] == "2 nodes meet at 192.0.2.1:9; waiting 1 s for them"


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_run_on_two_ranks_from_the_command_line(tmp_path: Path, is_wrong: bool) -> None:
    model = "/nowhere" if is_wrong else save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"Q{i}?", "chosen": "Yes.", "rejected": "No."} for i in range(99)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "tandem", "sft", "--num-gpus", "2", "--actor-model", model]
    command += ["--data", str(tmp_path / "p.jsonl"), "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if is_wrong:
        assert done.returncode == 2
        assert done.stderr.count("model '/nowhere' must be a folder with config.json") == 1
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("sft: done in") == 1
        assert (tmp_path / "run" / "sft" / "model.safetensors").exists()
        assert (tmp_path / "run" / "logs" / "rank-1.log").exists()


@pytest.mark.slow
def test_two_nodes_in_two_folders_train_and_both_have_the_model(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"Q{i}?", "chosen": "Yes.", "rejected": "No."} for i in range(99)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "tandem", "sft", "--num-nodes", "2", "--num-gpus", "1"]
    command += ["--rdzv", f"127.0.0.1:{free_port()}", "--actor-model", model, "--device", "cpu"]
    command += ["--data", str(tmp_path / "p.jsonl"), "--output-dir", "run", "--save-every", "1"]
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    launchers = [
        subprocess.Popen(
            command,
            cwd=node,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in nodes
    ]
    texts = [launcher.communicate(timeout=180)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], texts
    said = "".join(texts)
    assert said.count("no file system is shared: run is 2 folders (ranks 0 on ") == 1, said
    manifests = [(node / "run/sft/MANIFEST.json").read_bytes() for node in nodes]
    assert manifests[0] == manifests[1]
    assert all(is_whole(node / "run/sft") for node in nodes)
    ends = [text.splitlines()[-1] for text in texts]
    assert sum(end.startswith("chat:") for end in ends) == 1
    assert sum(end.endswith(": finished; its models are here too: run/sft") for end in ends) == 1


@pytest.mark.parametrize("second", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_node_whose_link_is_down_heeds_signals(tmp_path: Path, second: bool) -> None:
    """One signal stops ranks that listen, a second one others."""
    port = free_port()
    flags = ("--num-nodes", "2", "--num-gpus", "1", "--rdzv")
    how = "deaf" if second else "sleeps"
    launchers = [start_launcher(tmp_path, PLAIN, how, *flags, f"127.0.0.1:{port}")]
    try:
        wait_for(lambda: listens(port))
        link = Link(port)
        far = start_launcher(tmp_path, PLAIN, how, *flags, f"127.0.0.1:{link.port}")
        launchers.append(far)
        ranks = pids(tmp_path, 2)
        link.cut()
        time.sleep(1.5)  # for the launcher to ask; it does once a second
        far.terminate()
        if second:
            time.sleep(0.3)
            far.terminate()
        text = far.communicate(timeout=30)[0]
        assert far.returncode == 143, text
        assert "stopped by SIGTERM" in text
        assert sum(is_alive(pid) for pid in ranks) == 1
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()
