"""Two torchrun agents as two nodes: the run of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.ports import free_port
from tandem.config.load import dump_config
from tandem.config.schema import ParallelConfig
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import assert_same_run, ran


@pytest.mark.slow
@pytest.mark.parametrize("ranks_each", [1, 2])
def test_two_agents_are_two_nodes(tmp_path: Path, ranks_each: int) -> None:
    model = save_tiny_model(tmp_path / "model")
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(tmp_path / "alone", model, data, ppo__ema=True)
    ran(config)
    ours = replace(
        config,
        output_dir=str(tmp_path / "nodes"),
        parallel=ParallelConfig(actor_zero_stage=3, critic_zero_stage=2, zero_hpz=ranks_each > 1),
    )
    (tmp_path / "nodes.yaml").write_text(dump_config(ours), encoding="utf-8")
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node"]
    agent += [str(ranks_each), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    program = ["-m", "tandem", "train", "--config", str(tmp_path / "nodes.yaml")]
    nodes = [
        subprocess.Popen(
            [*agent, "--node-rank", str(node), *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "".join(said)
    assert "report:" in said[0]
    assert_same_run(tmp_path / "nodes", tmp_path / "alone")
