"""Predictions: properties that hold whatever the constants are, hardware, records."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.load import build_config
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.errors import ConfigError
from tandem.memory.dimensions import Shape
from tandem.plan.knobs import nested
from tandem.predict import machine
from tandem.predict.hardware import as_values, find_hardware, hardware_names, read_hardware
from tandem.predict.memory import Models
from tandem.predict.models import config_of_shape
from tandem.predict.record import Outcome, add_outcomes, read_outcomes
from tandem.predict.rows import Rows, common_beginning, rows_of
from tandem.predict.stage import StagePrediction, predict_stage
from tandem.predict.work import work_of

LLAMA = config_of_shape("layers=8,width=512,heads=8,vocabulary=8192")
ROWS = Rows(count=1000, tokens=200, answered=100, longest=256)
LONGER = replace(ROWS, tokens=400, answered=200, longest=512)
ROOMY = {"micro_batch_tokens": 1 << 20}  # else fewer of the longer rows fit
CPU = replace(find_hardware("1xH100"), kind="cpu", count=1, packs=True, memory=64e9)


def models_of(text: str = "") -> Models:
    config = config_of_shape(text) if text else LLAMA
    return Models.of(config, config)


def config_with(stage: str, **knobs: Any) -> RunConfig:
    return build_config(nested({"stages": [stage], "reward_model": "x", **knobs}), where="")


def predicted(
    stage: str = "ppo", *, ranks: int = 1, shape: str = "", on_cpu: bool = False,
    rows: Rows = ROWS, **knobs: Any,
) -> StagePrediction:  # fmt: skip
    hardware = CPU if on_cpu else find_hardware(f"{ranks}xH100")
    config = config_with(stage, **{name.replace("__", "."): v for name, v in knobs.items()})
    return predict_stage(config, stage_of(stage), models_of(shape), rows, hardware, ranks)


ZERO = {n: {f"parallel__{role}_zero_stage": n for role in ("actor", "critic")} for n in range(4)}


def peaks(found: StagePrediction) -> dict[str, float]:
    return {name: phase.peak for name, phase in found.phases.items()}


def part(found: StagePrediction, phase: str, name: str) -> float:
    return found.phases[phase].live.get(name, 0.0)


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo", "grpo"])
def test_more_of_everything_never_takes_less(stage: str) -> None:
    for small, large in (
        ({"shape": "layers=4,width=256"}, {"shape": "layers=8,width=256"}),
        ({"shape": "layers=4,width=256"}, {"shape": "layers=4,width=512"}),
        ({"micro_batch_tokens": 512}, {"micro_batch_tokens": 4096}),
        ({"rows": ROWS, **ROOMY}, {"rows": LONGER, **ROOMY}),
    ):
        less, more = predicted(stage, **small), predicted(stage, **large)
        for phase, peak in peaks(less).items():
            assert peak <= peaks(more)[phase], (phase, small, large)
        if "rows" in small or "shape" in small:
            assert less.step_seconds < more.step_seconds


@pytest.mark.parametrize("stage", ["dpo", "ppo"])
def test_another_model_as_the_reference_takes_its_own_weights_and_time(stage: str) -> None:
    models, hardware = models_of(), find_hardware("1xH100")
    tower = models_of("layers=16,width=1024,heads=8,vocabulary=8192").policy

    def found(rank: int, reference: Shape | None) -> StagePrediction:
        config = config_with(stage, dtype="bf16", **{"lora.rank": rank})
        other = replace(models, reference=reference)
        return predict_stage(config, stage_of(stage), other, ROWS, hardware, 1)

    def gap(rank: int, reference: Shape) -> float:
        own, other = found(rank, None), found(rank, reference)
        assert other.step_seconds >= own.step_seconds
        return part(other, "train", "weights") - part(own, "train", "weights")

    size = 2 * models.policy.parameters
    assert gap(0, models.policy) == 0
    assert gap(8, models.policy) == pytest.approx(size, rel=0.01)
    assert gap(0, tower) == pytest.approx(2 * tower.parameters - size, rel=0.01)


def test_given_answers_that_a_teacher_explains_take_its_forward() -> None:
    hardware, texts = find_hardware("1xH100"), replace(ROWS, ptx=150.0)
    tower = models_of("layers=16,width=1024,heads=8,vocabulary=8192").policy
    models = replace(models_of(), reference=tower)
    flops = []
    for target in ("tokens", "reference"):
        config = config_with("distill", **{
            "reference_model": "x", "grpo.ptx_data": ["x.jsonl"], "grpo.ptx_batch_size": 16,
            "grpo.ptx_target": target, "grpo.prompts_per_step": 8, "grpo.minibatch_size": 8,
        })  # fmt: skip
        found = predict_stage(config, stage_of("distill"), models, texts, hardware, 1)
        flops.append(found.phases["train"].flops)
    tokens, head = 16 * 150, tower.vocabulary * tower.width
    expected = 2 * tokens * (tower.linear_weights + head)
    assert flops[1] - flops[0] == pytest.approx(expected, rel=0.05)  # the rest is attention


def test_nodes_are_the_hardwares_unless_the_knobs_say_otherwise() -> None:
    def copied(ranks: int, **knobs: int) -> float:
        found = predicted("sft", ranks=ranks, **ZERO[3], parallel__zero_hpz=True, **knobs)
        return part(found, "train", "second copy in the node")

    assert copied(8) == copied(16, parallel__ranks_per_node=16) == 0
    assert copied(16) == copied(16, parallel__ranks_per_node=8) > 0


def test_the_baseline_of_kto_takes_two_more_forwards() -> None:
    pairs, labelled = (predicted(stage).phases["train"].flops for stage in ("dpo", "kto"))
    assert labelled == pytest.approx(pairs * 6 / 4, rel=0.01)


def test_a_forward_moves_less_than_a_step_of_the_same_tokens() -> None:
    def moved(stage: str) -> float:
        return (predicted(stage, on_cpu=True).phases["train"].terms or {})["activations"]

    forward = (moved("kto") - moved("dpo")) / 2  # KTO's baseline takes two more
    step = moved("dpo") - forward  # beside the reference's
    assert 0 < forward < step


def test_a_policy_in_pieces_gathers_again_to_be_compared_with_its_reference() -> None:
    def loads(stage: str, ranks: int) -> float:
        found = predicted(stage, ranks=ranks, on_cpu=True, **ZERO[3], lora__rank=8)
        return part(found, "load", "read or checked, then AdamW and masters")

    gathered = part(predicted("dpo", ranks=2, on_cpu=True, **ZERO[3]), "train", "gathered weights")
    assert loads("dpo", 2) - loads("sft", 2) >= gathered > 0
    assert loads("dpo", 1) == loads("sft", 1)


def test_the_first_step_pays_for_memory_that_is_new() -> None:
    def new(name: str, **more: Any) -> float:
        return (predicted("ppo", **more).phases[name].terms or {}).get("first", 0.0)

    once, often = ({"on_cpu": True, "ppo__steps": steps} for steps in (2, 20))
    assert new("train", **once) == pytest.approx(10 * new("train", **often))
    assert new("load", **once) == new("load", **often) > 0
    moments = 8 * 2 * models_of().policy.parameters  # of policy and critic
    # Some of them lie in what the rollout has freed.
    assert 0 < new("train", **once) * CPU.bandwidth < moments
    assert new("train") == 0, "a GPU's allocator is not counted"


def test_the_first_update_of_a_run_keeps_no_states() -> None:
    def forward(steps: int, kept: float) -> tuple[float, float]:
        found = predicted("ppo", on_cpu=True, ppo__steps=steps, kept_states=kept)
        return found.phases["train"].flops, (found.phases["generate"].terms or {}).get("keeping", 0)

    computed, _ = forward(2, 0.0)
    (once, little), (often, much) = forward(2, 0.9), forward(200, 0.9)
    assert computed - once == pytest.approx((computed - often) / 2, rel=0.01)
    assert little == pytest.approx(much / 2, rel=0.01)


@pytest.mark.parametrize("stage", ["sft", "ppo"])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_saves_memory_never_raises_the_part_that_it_acts_on(stage: str, on_cpu: bool) -> None:
    run = partial(predicted, stage, on_cpu=on_cpu)
    plain = run(dtype="bf16")
    again = run(dtype="bf16", gradient_checkpointing=True)
    for phase in ("rehearse", "train"):
        assert part(again, phase, "activations") <= part(plain, phase, "activations")
        assert again.phases[phase].peak <= plain.phases[phase].peak
    for kind in ("mlp", "attention"):
        parts = run(dtype="bf16", gradient_checkpointing=True, recompute=kind)
        kept = [part(found, "train", "activations") for found in (again, parts, plain)]
        assert kept == sorted(kept)
        assert plain.step_seconds <= parts.step_seconds <= again.step_seconds
    offload = run(dtype="bf16", parallel__offload=["optimizer"])
    assert part(offload, "train", "AdamW") <= part(plain, "train", "AdamW")
    halved = run(dtype="bf16", parallel__offload=["optimizer"], parallel__offload_share=0.5)
    on_gpu = 0.0 if on_cpu else part(plain, "train", "AdamW") / 2
    assert part(halved, "train", "AdamW on the GPU") == pytest.approx(on_gpu) or on_cpu
    assert offload.step_seconds >= halved.step_seconds
    lora = run(dtype="bf16", lora__rank=8)
    for kind in ("int8", "nf4"):
        quantized = run(dtype="bf16", lora__rank=8, parallel__frozen_weights=kind)
        assert part(quantized, "train", "weights") < part(lora, "train", "weights")
    assert part(lora, "train", "AdamW") < part(plain, "train", "AdamW")
    shared = run(dtype="bf16", lora__rank=8, parallel__shared_base=True)
    assert shared.peak <= lora.peak


def test_more_ranks_and_higher_zero_stages_never_take_more_of_what_they_split() -> None:
    for stage in (1, 2, 3):
        for fewer, more in ((1, 2), (2, 4), (4, 8)):
            less = predicted("ppo", ranks=more, **ZERO[stage])
            whole = predicted("ppo", ranks=fewer, **ZERO[stage])
            for name in ("AdamW", "KV memory"):
                assert part(less, "generate", name) <= part(whole, "generate", name)
    stages = [predicted("ppo", ranks=4, **ZERO[stage]) for stage in range(4)]
    for low, high in itertools.pairwise(stages):
        assert part(high, "score", "weights") <= part(low, "score", "weights")
        assert part(high, "train", "gradients") <= part(low, "train", "gradients")


def test_steps_totals_price_and_disk() -> None:
    sft = predicted("sft", sft__batch_size=100, sft__epochs=2.0, sft__max_steps=0, save_every=5)
    assert sft.work.steps == 20
    assert sft.total_seconds == pytest.approx(
        20 * sft.step_seconds + sum(sft.phases[n].seconds or 0 for n in ("load", "save"))
    )
    assert sft.dollars == pytest.approx(2.95 * (sft.total_seconds or 0) / 3600)
    assert predicted("sft", rows=replace(ROWS, count=0)).total_seconds is None
    assert predicted("sft", keep_checkpoints=4).disk > sft.disk
    assert predicted("sft", save_dtype="fp32").models == 2 * sft.models < sft.disk
    assert predicted("ppo", ppo__ema=True).models > predicted("ppo").models
    assert predicted("sft", sft__keep_best=True).disk == predicted("sft", keep_checkpoints=3).disk
    assert "save" not in predicted("sft", save_every=0).phases
    trained = sft.phases["train"]
    assert trained.flops > 6 * 0.9 * models_of().policy.linear_weights * 100 * 200
    assert trained.reserved > trained.peak  # live and reserved apart


def test_a_reward_models_scores_are_normalized_beside_the_policy_that_answers() -> None:
    """The policy comes to memory after the last step, when the optimizer's states are there too."""
    knobs = {"on_cpu": True, "rows": LONGER, "actor_model": "x", "sampling__max_new_tokens": 64}
    with_answers = predicted("reward", reward__normalize_prompts=32, **knobs)
    without = predicted("reward", reward__normalize_prompts=0, **knobs)
    assert "normalize" not in without.phases
    assert "normalize" not in predicted("reward", on_cpu=True).phases, "there is no policy"
    resting = sum(without.phases["train"].live.get(n, 0.0) for n in ("weights", "AdamW"))
    policy = models_of().policy
    live = with_answers.phases["normalize"].live
    assert live["weights"] + live["AdamW"] == pytest.approx(resting + 4 * policy.parameters)
    assert live["packed weights"] == pytest.approx(4 * policy.linear_weights, rel=0.2)
    more = predicted("reward", reward__normalize_prompts=64, **knobs).phases["normalize"].live
    assert more["KV memory"] == 2 * live["KV memory"]
    half = predicted("reward", reward__normalize_prompts=32, dtype="bf16", **knobs)
    assert half.phases["normalize"].live["packed weights"] == live["packed weights"] / 2


def test_several_ranks_are_larger_each_and_a_critic_costs() -> None:
    one, two = predicted(on_cpu=True), predicted(on_cpu=True, ranks=2, **ZERO[0])
    assert two.phases["load"].reserved > one.phases["load"].reserved
    critic, none = predicted("ppo"), predicted("grpo", grpo__minibatch_size=32)
    assert part(none, "train", "AdamW") < part(critic, "train", "AdamW")


ONE_UPDATE = {"ppo__prompts_per_step": 16, "ppo__minibatch_size": 16}


def test_kept_states_are_counted_where_one_update_reads_them() -> None:
    none = predicted(on_cpu=True, **ONE_UPDATE, kept_states=0.0)
    kept = predicted(on_cpu=True, **ONE_UPDATE)
    shape, sampling = models_of().policy, config_with("ppo").sampling
    numbers = shape.query_width + 2 * shape.kv_width + 2 * shape.width + 2 * shape.inner
    tokens = 16 * (ROWS.tokens + sampling.max_new_tokens - 1)
    for phase in ("generate", "score", "train"):
        expected = 4.0 * shape.layers * numbers * tokens
        assert part(kept, phase, "kept states") == pytest.approx(expected)
    assert part(kept, "rehearse", "kept states") == 0
    saved = none.phases["train"].flops - kept.phases["train"].flops
    assert 0.1 < saved / none.phases["train"].flops < 1 / 6  # of actor and critic, a third of one


@pytest.mark.parametrize(
    ("stage", "knobs"),
    [
        ("ppo", {"ppo__prompts_per_step": 16}),
        ("ppo", {**ONE_UPDATE, "gradient_checkpointing": True}),
        ("ppo", {**ONE_UPDATE, "lora__rank": 8}),
        ("ppo", {**ONE_UPDATE, "parallel__offload": ["params"]}),
        ("ppo", {**ONE_UPDATE, "ppo__old_logprobs": "forward"}),
        ("ppo", {**ONE_UPDATE, "kept_states": 1e-9}),
        ("online-dpo", {"ppo__prompts_per_step": 16, "ppo__minibatch_size": 32}),
        ("grpo", {"grpo__prompts_per_step": 8, "grpo__minibatch_size": 64,
                  "grpo__algorithm": "dapo", "sampling__samples_per_prompt": 8}),
    ],
    ids=str,
)  # fmt: skip
def test_kept_states_are_not_counted_where_nothing_keeps_them(
    stage: str, knobs: dict[str, Any]
) -> None:
    found = predicted(stage, on_cpu=True, **knobs)
    assert all(part(found, phase, "kept states") == 0 for phase in found.phases)


def test_hardware_is_named_counted_priced_or_a_file(tmp_path: Path) -> None:
    found = find_hardware("8xa100-80gb")
    assert (found.name, found.count, found.memory) == ("A100-80G", 8, 80e9)
    assert find_hardware("H200", price=2.1).price == 2.1
    assert find_hardware("H200").rate("bf16", 64) == 989e12  # dense
    assert find_hardware("8xV100").name == "V100-32G"  # the only size
    for wrong, near in (
        ("8xZ9", ""), ("0xH100", ""), ("A100", "Did you mean A100-80G or A100-40G"),
        ("8xH10", "Did you mean H100 or H200?"), ("8xL40", "Did you mean L40S or L4?"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"A100-40G, A100-80G, H100.*{re.escape(near)}"):
            find_hardware(wrong)
    assert len(hardware_names()) > 10


def test_a_machine_is_kept_unless_it_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.delenv(machine.MACHINE_FILE, raising=False)
    busy, said = [2.0], list[str]()
    monkeypatch.setattr(machine, "measure_machine", lambda device: (CPU, busy[0]))
    assert machine.known_machine() is None
    machine.this_machine(said.append)
    assert "busy" in said[-1]
    assert machine.known_machine() is None
    busy[0] = 1.0
    machine.this_machine()
    kept = machine.known_machine()
    assert kept is not None
    assert kept.bandwidth == CPU.bandwidth
    # With GPUs another file is kept, but where none is asked for.
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    assert machine.known_machine() is not None
    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.known_machine() is None
    assert machine.known_machine("cpu") is not None
    card = replace(CPU, kind="gpu", memory=8e10)
    monkeypatch.setattr(machine, "measure_machine", lambda device: (card, 1.0))
    machine.this_machine()
    assert machine.known_machine() == card  # its own memory, not the host's
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert machine.known_machine() is not None
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(as_values(CPU)))
    assert read_hardware(file) == CPU
    monkeypatch.setenv(machine.MACHINE_FILE, str(file))
    assert machine.this_machine() == CPU


def test_predictions_are_kept_by_stage_and_phase(tmp_path: Path) -> None:
    first = Outcome(stage="a", phase="train", ranks=1, hardware="h", dtype="fp32",
                    predicted_bytes=110, measured_bytes=100, predicted_seconds=3, cpu_seconds=2,
                    measured_seconds=9)  # fmt: skip
    add_outcomes(tmp_path, [first])
    add_outcomes(tmp_path, [replace(first, predicted_bytes=90)])
    (found,) = read_outcomes(tmp_path)
    assert found.memory_error == pytest.approx(-0.1)
    assert found.time_error == pytest.approx(0.5)
    assert math.isnan(replace(found, predicted_seconds=None).time_error)


def test_damaged_predictions_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "predictions.jsonl"
    first = Outcome(stage="a", phase="train", ranks=1, hardware="h", dtype="fp32",
                    predicted_bytes=110, measured_bytes=100)  # fmt: skip
    add_outcomes(tmp_path, [first])
    with path.open("a") as file:
        file.write('{"stage": "sft", "pha')  # a kill while the line was written
    assert read_outcomes(tmp_path) == [first]
    add_outcomes(tmp_path, [replace(first, phase="load")])
    assert read_outcomes(tmp_path) == [first, replace(first, phase="load")]
    assert capsys.readouterr().err == ""
    damaged = [{"measured_bytes": "1"}, {"cpu_seconds": [2]}, {"terms": 3}, {"unheard_of": 4}]
    values = json.loads(path.read_text("utf-8").splitlines()[0])
    with path.open("ab") as file:
        file.write(b"".join(json.dumps(values | bad).encode() + b"\n" for bad in damaged))
        file.write(b'[]\n{"stage": \xff\n')
    assert len(read_outcomes(tmp_path)) == 2
    assert capsys.readouterr().err == f"warning: {path}: left out 6 damaged lines\n"


def test_lengths_of_rows() -> None:
    rows = rows_of([[(4, 1), (6, 3)], [(10, 2), (2, 2)]], 50, "here")
    # The prompts of 3 and of 0 tokens (the second row's are not alike) count once.
    found = (rows.count, rows.sequences, rows.tokens, rows.answered, rows.longest, rows.widest)
    assert found == (50, 2, 9.5, 4, 10, 12)
    assert (rows.cost, rows.dearest) == ((2 * 6 + 2 * 10) / 2, 2 * 10)


def test_what_most_rows_begin_with() -> None:
    assert common_beginning(["You are. A", "Other", "You are. B", "You do"]) == "You "
    assert common_beginning([(1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 4)]) == (1, 2)
    assert common_beginning([(1, 2)]) is None


def test_a_micro_batch_counts_a_pair_as_two_of_its_longer_answer() -> None:
    """The prompt that they share is computed once, so what is computed is less than the limit."""
    config = RunConfig(stages=("reward",), micro_batch_tokens=320)
    rows = Rows(count=1000, sequences=2, tokens=24, answered=16, longest=20, widest=28, cost=32)
    assert work_of(config, stage_of("reward"), 1, rows).micro_tokens == 10 * 24
    assert work_of(config, stage_of("reward"), 1, replace(rows, cost=0)).micro_tokens == 320


def test_what_rows_begin_with_alike_is_computed_once_in_a_micro_batch() -> None:
    config = RunConfig(stages=("sft",), micro_batch_tokens=1000)
    config = replace(config, sft=replace(config.sft, batch_size=40))
    rows = Rows(count=1000, tokens=100, answered=30, longest=100)
    apart = work_of(config, stage_of("sft"), 1, rows)
    alike = work_of(config, stage_of("sft"), 1, replace(rows, alike=64))
    assert (apart.tokens, apart.micro_tokens, apart.rehearsed) == (4000, 1000, 1000)
    # Four micro-batches of ten rows, by the tokens of whole rows.
    assert alike.micro_batches == apart.micro_batches == 4
    assert alike.tokens == 4 * (64 + 10 * 36)
    assert alike.micro_tokens == alike.rehearsed == 64 + 10 * 36


@pytest.mark.parametrize("samples", [1, 4])
def test_what_prompts_begin_with_alike_fills_micro_batches_once(samples: int) -> None:
    config = RunConfig(micro_batch_tokens=1000)
    config = replace(
        config,
        ppo=replace(config.ppo, prompts_per_step=64, minibatch_size=64 * samples, epochs=2),
        sampling=replace(config.sampling, samples_per_prompt=samples, max_new_tokens=20),
    )
    rows = Rows(count=1000, tokens=100, longest=100, alike=80)
    work = work_of(config, stage_of("ppo"), 1, rows)
    own = 64 * (20 + samples * 20)  # of all prompts and answers
    micro = -(-own // (1000 - 80))
    assert work.updates == 2
    assert work.micro_batches == 2 * micro
    assert work.tokens == own + micro * 80
    assert work.micro_tokens == 1000


def test_the_rehearsal_takes_as_many_rows_as_the_dearest_allows() -> None:
    config = RunConfig(stages=("reward",), micro_batch_tokens=320)
    rows = Rows(count=1000, sequences=2, tokens=24, answered=16, longest=20, widest=28, cost=32,
                dearest=40)  # fmt: skip
    assert work_of(config, stage_of("reward"), 1, rows).rehearsed == 8 * 28
    assert work_of(config, stage_of("reward"), 1, replace(rows, dearest=400)).rehearsed == 28


@pytest.mark.parametrize(
    ("limit", "share"),
    [(64 * 40, 0.0), (2100, 2144 / 2100 - 1), (1700, 2144 / 1700 - 1), (1024, 1.0), (320, 1.0)],
)
def test_a_later_micro_batch_holds_what_the_first_leaves(limit: int, share: float) -> None:
    """64 rows of 32 tokens and at most 40 come to 2,048, and now and then to 2,144 or less."""
    config = RunConfig(stages=("reward",), micro_batch_tokens=limit)
    config = replace(config, reward=replace(config.reward, batch_size=64))
    rows = Rows(count=1000, sequences=1, tokens=32, answered=16, longest=40, cost=32, dearest=40)
    work = work_of(config, stage_of("reward"), 1, rows)
    assert work.later == pytest.approx(share * work.micro_tokens, abs=1)


@pytest.mark.parametrize(
    "text", ["layers=2,width=64,heads=7", "layers=2,width=64,heads=8,kv_heads=3"]
)
def test_a_shape_must_be_one_that_a_model_can_have(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of heads"):
        config_of_shape(text)


def test_a_measurement_ends_on_a_busy_machine() -> None:
    """Work that waits takes little CPU time; the clock ends it."""
    begin = time.monotonic()
    machine._quickest(lambda: time.sleep(0.01), 0.5)
    assert time.monotonic() - begin < 60
