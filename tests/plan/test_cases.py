"""Which cases a sweep has: all combinations that can be, the others with reasons."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config.load import build_config
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError
from tandem.plan.cases import Axes, Skipped, skip_reasons, sweep_cases
from tandem.plan.knobs import nested, with_knobs

STEPS = ("sft", "reward", "ppo")


def test_stages_lora_offload_and_hybrid_engine_are_crossed() -> None:
    cases, skipped = sweep_cases(_config(), STEPS, 2, Axes(variants=False))
    assert skipped == []
    count = {step: sum(case.stage == step for case in cases) for step in STEPS}
    assert count == {"sft": 16, "reward": 16, "ppo": 32}
    assert len({(case.stage, case.name) for case in cases}) == 64
    last = next(case for case in cases if case.name == "zero3-lora128-offload-plain")
    assert last.stage == "ppo"
    assert dict(last.knobs) == {
        "parallel.actor_zero_stage": 3,
        "parallel.critic_zero_stage": 3,
        "lora.rank": 128,
        "parallel.offload": ["optimizer"],
        "hybrid_engine": False,
    }


def test_zero_plus_plus_needs_nodes_and_says_so() -> None:
    one_node, skipped = sweep_cases(_config(), ("sft",), 4, Axes(lora=(0,)))
    assert not _variants(one_node)
    lines = skip_reasons(skipped)
    assert any(
        line.startswith("skipped (1): sft/zero3-hpz: ") and "share one node" in line
        for line in lines
    )
    two_nodes, skipped = sweep_cases(_config(ranks_per_node=2), ("sft",), 4, Axes(lora=(0,)))
    assert _variants(two_nodes) == {"qwz", "hpz", "qgz", "zero++"}
    assert skipped == []
    forced, _ = sweep_cases(_config(zero_forced=True), ("sft",), 4, Axes(lora=(0,)))
    assert _variants(forced) == {"qwz", "qgz"}  # a second copy on one node would be the first


def test_quantized_bases_need_adapters() -> None:
    def names(lora: tuple[int, ...]) -> set[str]:
        return _variants(sweep_cases(_config(), ("ppo",), 2, Axes(lora=lora))[0])

    assert names((0, 8)) == {"int8-base-lora8", "nf4-base-lora8", "tp2"}
    assert names((0,)) == {"tp2"}


def test_slices_must_fit_the_ranks() -> None:
    _, skipped = sweep_cases(_config(), ("ppo",), 3, Axes(lora=(0,)))
    assert (
        Skipped("ppo", "zero3-tp2", "parallel.inference_tp_size 2 must divide the ranks; got 3")
        in skipped
    )


def test_what_the_configuration_refuses_is_skipped() -> None:
    config = _config(inference_tp_size=2)
    _, skipped = sweep_cases(config, ("ppo",), 2, Axes(stages=(3,), lora=(0, 8)))
    reasons = {case.name: case.reason for case in skipped}
    assert "must go without tensor-parallel generation" in reasons["zero3-qwz"]
    assert not {"zero3-lora8", "zero3-nf4-base-lora8"} & reasons.keys()


def test_one_line_per_reason() -> None:
    skipped = [Skipped("sft", "a", "no"), Skipped("ppo", "b", "never"), Skipped("ppo", "c", "no")]
    assert skip_reasons(skipped) == ["skipped (2): sft/a ppo/c: no", "skipped (1): ppo/b: never"]


def test_knobs_by_dotted_name() -> None:
    assert nested({"lora.rank": 8, "seed": 1, "lora.alpha": 2.0}) == {
        "lora": {"rank": 8, "alpha": 2.0},
        "seed": 1,
    }
    config = with_knobs(_config(), {"lora.rank": 8, "parallel.offload": ["optimizer"]})
    assert (config.lora.rank, config.parallel.offload) == (8, ("optimizer",))
    with pytest.raises(ConfigError, match=r"lora\.rnk"):
        with_knobs(config, {"lora.rnk": 8})
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        with_knobs(config, {"lora.rank": -1})


def _variants(cases: Any) -> set[str]:
    """What stands behind zero3- beside the crossed cases."""
    names = {case.name.removeprefix("zero3-") for case in cases if case.name.startswith("zero3-")}
    first = {name.split("-")[0] for name in names}
    crossed = {name for name in first if name.startswith("lora") or name in ("offload", "plain")}
    return {name for name in names if name.split("-")[0] not in crossed}


def _config(**parallel: Any) -> RunConfig:
    return build_config({"data": ["embedded"], "parallel": parallel}, where="")
