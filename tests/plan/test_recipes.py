"""Every recipe loads through the configuration's checks and fits the hardware that it names."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, OPTConfig, PreTrainedConfig, Qwen3Config

from tandem.cli import main
from tandem.config.flags import parse_run_flags
from tandem.config.load import check_config, load_config
from tandem.config.schema import RunConfig
from tandem.ops import native
from tandem.plan import run
from tandem.plan.run import plan_memory
from tandem.predict.hardware import as_values, find_hardware
from tandem.predict.machine import MACHINE_FILE
from tandem.predict.models import config_of, shape_for

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
HARDWARE = re.compile(r"^# hardware: (\d+) (GPU|CPU)s? x (\d+) GB$", re.MULTILINE)
SWEEP = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text(encoding="utf-8")
SPARE = 0.1
"""Of the memory, for what the formula does not count: libraries, fragmentation."""

SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
OPT_1B = OPTConfig(
    hidden_size=2048,
    ffn_dim=8192,
    num_hidden_layers=24,
    num_attention_heads=32,
    word_embed_proj_dim=2048,
)
OPT_350M = OPTConfig(
    hidden_size=1024,
    ffn_dim=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    word_embed_proj_dim=512,
    do_layer_norm_before=False,
)
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
QWEN_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
MODELS: dict[str, tuple[PreTrainedConfig, PreTrainedConfig | None, float]] = {
    "smollm2-135m": (SMOLLM2, None, 0.135e9),
    "opt-1.3b": (OPT_1B, OPT_350M, 1.316e9),
    "llama-3-8b": (LLAMA_8B, None, 8.03e9),
    "qwen3-8b-lora": (QWEN_8B, None, 8.19e9),
}
"""By recipe: the policy, critic and reward model where they are another, and the policy's size."""


def test_every_recipe_is_checked_here() -> None:
    assert {path.stem for path in RECIPES} == MODELS.keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_hardware_that_it_names(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest phases that docs/sweep.md tells."""
    config = load_config(recipe)
    check_config(config)
    told = HARDWARE.search(recipe.read_text(encoding="utf-8"))
    assert told, f"{recipe} must say: # hardware: N GPUs x N GB"
    ranks, kind, gigabytes = int(told[1]), told[2], int(told[3])
    # That machine's, not this one's: a CPU's plan depends on both.
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(run, "free_bytes", lambda device: gigabytes * 1e9)
    device = torch.device("cuda" if kind == "GPU" else "cpu")
    assert config.device == ("cuda" if kind == "GPU" else "auto")
    policy, other, size = MODELS[recipe.stem]
    assert _parameters(policy) == pytest.approx(size, rel=0.01)
    largest: dict[str, str] = {}
    for stage in config.stages:
        model = other if stage == "reward" and other else policy
        plan = plan_memory(config, stage, model, ranks=ranks, critic=other, device=device)
        peaks = {phase: plan.peak(phase) / 1e9 for phase in ("load", *plan.phases)}
        assert max(peaks.values()) < (1 - SPARE) * gigabytes, (stage, peaks)
        assert max(peaks.values()) > 0.2 * gigabytes or kind == "CPU" or stage != config.stages[-1]
        largest[stage] = f"{max(peaks.values()):.2g}"
    assert _told(recipe.stem) == (f"{ranks} {kind}{'s' * (ranks > 1)}", gigabytes, largest)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_commands_run_without_a_download(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`tandem plan` as its header has it says that it fits; `tandem train` parses."""
    machine = replace(find_hardware("1xH100"), kind="cpu", memory=8e9)
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(as_values(machine)))
    monkeypatch.setenv(MACHINE_FILE, str(tmp_path / "machine.yaml"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(recipe.parents[1])
    text = recipe.read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^#   tandem (.*)$", text, re.MULTILINE)]
    plan, train = commands
    assert plan[0] == "plan"
    assert main(plan) == 0
    assert "a rank, in" in (out := capsys.readouterr().out)
    told = HARDWARE.search(text)
    assert told
    if told[2] == "GPU":
        assert f"plan for {told[1]} x A100-{told[3]}G" in out
    assert train[0] == "train"
    own = {"--num-gpus", "8"}  # the launcher's
    assert parse_run_flags([w for w in train[1:] if w not in own], "train") == load_config(recipe)


def test_published_sizes_are_the_models_themselves() -> None:
    for recipe in RECIPES:
        policy, other, _ = MODELS[recipe.stem]
        config = load_config(recipe)
        assert shape_for(config_of(config.actor_model)).parameters == _parameters(policy)
        if other is not None:
            assert shape_for(config_of(config.reward_model)).parameters == _parameters(other)


def _told(recipe: str) -> tuple[str, int, dict[str, str]]:
    """The machine, its gigabytes and each stage's largest phase, as docs/sweep.md has them."""
    rows = re.findall(rf"^\| {re.escape(recipe)} \|(.*)\|$", SWEEP, re.MULTILINE)
    assert len(rows) == 1, f"docs/sweep.md must have one row of {recipe} in Memory by formula"
    hardware, sft, reward, rl = (cell.strip() for cell in rows[0].split("|"))
    found = re.fullmatch(r"(\d+ (?:GPUs?|CPUs?))(?: of|,) (\d+) GB", hardware)
    assert found, hardware
    last = load_config(RECIPES[0].parent / f"{recipe}.yaml").stages[-1]
    stages = {"sft": sft, "reward": reward, last: rl}
    return found[1], int(found[2]), {stage: cell for stage, cell in stages.items() if cell}


def _parameters(config: PreTrainedConfig) -> int:
    from tandem.memory.shape import shape_of

    return shape_of(config).parameters


def test_the_pages_lines_of_python_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    OPT_1B.save_pretrained(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", SWEEP, re.DOTALL)
    capsys.readouterr()
    exec(code, {"config": RunConfig(), "MODEL": str(tmp_path)})
    phase, *_ = capsys.readouterr().out.split()
    assert phase in ("generate", "score", "train")
