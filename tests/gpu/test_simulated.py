"""Training on a simulated GPU (`tests.simulated_gpu`): the command and the tests of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.config.load import dump_config
from tandem.ops import native
from tests.tiny import save_tiny_model, tiny_config, write_preferences

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has GPUs of its own"),
    pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="loads libraries as Linux names them"),
]
COMPARED = {
    "loss",
    "heldout_loss",
    "grad_norm",
    "margin",
    "reward",
    "kl",
    "entropy",
    "eos_rate",
    "response_tokens",
    "value_loss",
    "policy_loss",
    "actor_grad_norm",
    "critic_grad_norm",
    "heldout_reward",
}


def simulated(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A module run with the simulated GPU."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulated_gpu", "-m", *words],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TANDEM_GPU_KERNELS": "off", "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["values"] for line in lines]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="whole weights"),
        pytest.param(
            {
                "lora__rank": 4,
                "parallel__frozen_weights": "nf4",
                "parallel__optimizer_states": "8bit",
                "parallel__offload": ["optimizer", "params", "reference", "reward"],
                "kept_states": 0.0,
                "recompute": "layers",
            },
            id="adapters on nf4, offloaded",
        ),
    ],
)
def test_a_run_on_a_gpu_computes_what_it_does_on_a_cpu(
    changes: dict[str, object], tmp_path: Path
) -> None:
    """SFT, reward model and PPO in float32 by the same command: the same steps, answers too."""
    model, data = save_tiny_model(tmp_path / "model"), write_preferences(tmp_path / "rows.jsonl")
    for device in ("cpu", "cuda"):
        run = tiny_config(tmp_path / device, model, data, device=device, dtype="fp32", **changes)
        (tmp_path / f"{device}.yaml").write_text(dump_config(run))
    alone = [sys.executable, "-m", "tandem", "train", "--config", str(tmp_path / "cpu.yaml")]
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = simulated("tandem", "train", "--config", str(tmp_path / "cuda.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generation: the GPU" in done.stdout
    here, there = metrics_of(tmp_path / "cpu"), metrics_of(tmp_path / "cuda")
    assert len(here) == len(there) > 9
    compared = 0
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        for name in COMPARED & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name
            compared += 1
    assert compared > 40
