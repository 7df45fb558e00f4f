"""Ways out of memory: every knob is tried, three are named, and each is a flag that exists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.config.flags import parse_run_flags
from tandem.memory.model import Layout
from tandem.memory.steps import supervised_memory
from tandem.memory.ways import advice, size_text, ways_out
from tandem.predict.models import config_of_shape, shape_for


def test_every_knob_that_a_layout_leaves_is_tried_and_helps() -> None:
    shape, layout = (
        shape_for(config_of_shape("layers=6,width=128,heads=4,vocabulary=600")),
        Layout(half=True, ranks=4),
    )
    offered: list[str] = []
    for changes in (
        {}, {"stage": 2}, {"checkpointing": True, "recompute": "mlp"}, {"lora_rank": 8},
        {"offload_optimizer": True}, {"on_cpu": True, "half": False, "ranks": 1},
    ):  # fmt: skip
        changed = replace(layout, **changes)
        now = supervised_memory(shape, changed, tokens=256, answered=256).peak("train")
        ways = ways_out(shape, changed, 256, ranks=changed.ranks)
        assert len(ways) >= 3
        assert all(way.peak < 0.97 * now for way in ways)
        assert [way.cost for way in ways] == sorted(way.cost for way in ways)
        for way in ways:
            flags = [word for word in way.flags.split() if word.startswith("--")]
            assert len(flags) == len(set(flags))
            lora = ["--lora-rank", "8"] * bool(changed.lora_rank)
            parse_run_flags(["--actor-model", "x", *lora, *way.flags.split()], "sft")
        offered += [way.flags for way in ways]
    for knob in ("--micro-batch-tokens 128", "--parallel.optimizer-states 8bit",
                 "--gradient-checkpointing",
                 "--gradient-checkpointing --recompute mlp", "--recompute layers", "--lora-rank 16",
                 "--actor-zero-stage 3 --critic-zero-stage 3", "--offload optimizer",
                 "--offload optimizer params", "--lora-rank 16 --frozen-weights nf4",
                 "--frozen-weights nf4"):  # fmt: skip
        assert knob in offered


def test_no_way_has_adapters_where_there_can_be_none() -> None:
    shape = shape_for(config_of_shape("layers=6,width=128,heads=4,vocabulary=600"))
    for flag, offered in (("--lora-rank", True), ("", False)):
        ways = ways_out(shape, Layout(half=True, on_cpu=True), 16, rank_flag=flag)
        assert any("lora" in way.flags for way in ways) is offered
        assert not any(way.flags.startswith(" ") for way in ways)


def test_where_little_is_left_to_try_the_message_says_so() -> None:
    assert "the cheapest ways out: a (1.0 GiB), b" in advice(
        2**31, [("a", 2**30)] * 1 + [("b", 9)] * 2
    )
    assert "the only ways out: a (1.0 GiB), b" in advice(2**31, [("a", 2**30), ("b", 9)])
    assert advice(2**31, [("a", 2**30)]).endswith("; the only way out: a (1.0 GiB)")
    assert advice(2**31, []).endswith("; no knob makes it smaller")


@pytest.mark.parametrize(
    ("mebibytes", "text"),
    [(0.5, "0.5 MiB"), (999, "999 MiB"), (1000, "1.0 GiB"), (1024, "1.0 GiB"), (20480, "20 GiB")],
)
def test_sizes_are_written_without_powers_of_ten(mebibytes: float, text: str) -> None:
    assert size_text(mebibytes * 2**20) == text
