"""What ranks saved continues at other numbers of them; none holds a whole model to save it."""

from __future__ import annotations

import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.config.engine import engine_settings
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.engine.placement import Placement
from tandem.errors import TandemError
from tandem.models.save import save_model
from tandem.parallel.shard import shards_of
from tandem.parallel.world import World
from tandem.training.saving import save_anywhere
from tests.models.families import tokenizer
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import StopError, assert_same_run, ran, stop_at

MIB = 2**20


def stages(actor: int, critic: int) -> ParallelConfig:
    return ParallelConfig(actor_zero_stage=actor, critic_zero_stage=critic)


def ran_until(world: World, config: RunConfig, stage: str, step: int, lines: int) -> None:
    """Stops on all ranks alike.

    Args:
        lines: how many this session logs before; the ranks beside the first know no more.
    """
    with pytest.MonkeyPatch.context() as patch:
        if world.is_first:
            stop_at(patch, stage, step)
        else:
            patch.setattr("tandem.metrics.log.MutedLog.log", stopping_after(lines))
        with pytest.raises(StopError):
            ran(config, world)
    for thread in threading.enumerate():
        if thread.name.startswith("save"):
            thread.join()  # `on_ranks` ends its processes at once


def stopping_after(lines: int) -> object:
    """A muted log that stops the run at its next line but so many."""
    left = [None] * lines

    def stopping(self: object, at: int, values: dict[str, float]) -> list[object]:
        if not left:
            raise StopError
        left.pop()
        return []

    return stopping


def test_a_run_moves_between_numbers_of_ranks_and_stages(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "alone", tiny_model, preferences, ppo__ema=True, save_every=1,
        sft__max_steps=2, reward__max_steps=2, ppo__steps=2,
    )  # fmt: skip
    ran(config)
    config = replace(config, output_dir=str(tmp_path / "moved"))
    on_ranks(2, ran_until, replace(config, parallel=stages(3, 1)), "sft", 2, 2)
    on_ranks(3, ran_until, replace(config, parallel=stages(2, 3)), "reward", 2, 3)
    on_ranks(2, ran_until, replace(config, parallel=stages(0, 3)), "ppo", 2, 3)
    ran(config)
    # Shares of tokens beyond a border jump where a sum is rounded otherwise.
    assert_same_run(tmp_path / "moved", tmp_path / "alone", ("value_clip", "clip_fraction"))


def big_model() -> LlamaForCausalLM:
    """About 96 MB in float32, its largest weight 12 MB."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=6000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
        )
    )  # fmt: skip


def growth_of_saving(world: World, folder: Path, rank: int) -> int:
    """By how many bytes this rank's memory peaked above what it held, while it saved."""
    values = {"parallel": stages(3, 3)}
    config = replace(tiny_config(folder, "", ""), **values)
    if rank:
        config = replace(config, lora=replace(config.lora, rank=rank))
    model = Placement(engine_settings(config), world).policy(str(folder / "model"), trained=True)
    shards_of(model).reshard()
    save_anywhere(model, tokenizer(), folder / "warm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reset_peak()
    held = status("VmRSS")
    save_anywhere(model, tokenizer(), folder / "saved")
    assert before > 0
    return status("VmHWM") - held


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status(name: str) -> int:
    """A figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_no_rank_holds_more_than_a_weight_of_the_others_while_it_saves(
    tmp_path: Path, rank: int
) -> None:
    model = big_model()
    save_model(model, tokenizer(), tmp_path / "model")
    size = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    grown = on_ranks(3, growth_of_saving, tmp_path, rank)
    # What a gather sends and receives, and the pieces of one merged weight.
    assert max(grown) < 3 * largest + 8 * MIB < size * 0.55, [g / MIB for g in grown]
    found = load_file(tmp_path / "saved/model.safetensors")
    for name, weight in load_file(tmp_path / "model/model.safetensors").items():
        assert torch.equal(found[name], weight)


def said(world: World, folder: Path) -> str:
    """What the ranks say where the second cannot write its file."""
    import tandem.models.save as module

    config = replace(tiny_config(folder, "", ""), parallel=stages(3, 3))
    model = Placement(engine_settings(config), world).policy(str(folder / "model"), trained=True)

    def refuse(*arguments: object) -> None:
        write(*arguments)
        if world.rank == 1:
            raise OSError(28, "No space left on device")

    write, module.write_files = module.write_files, refuse  # type: ignore[assignment]
    try:
        save_anywhere(model, tokenizer(), folder / "saved")
    except TandemError as error:
        return str(error)
    return "saved"


def test_all_ranks_say_what_the_disk_refused_one(tmp_path: Path, tiny_model: str) -> None:
    (tmp_path / "model").symlink_to(tiny_model)
    lines = on_ranks(2, said, tmp_path)
    assert lines[0] == lines[1]
    assert "No space left on device" in lines[0]
