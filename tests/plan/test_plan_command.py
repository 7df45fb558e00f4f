"""`tandem plan` and `--auto-layout` as a user meets them, without torch being loaded by them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from tandem.cli import main
from tandem.config.flags import parse_run_flags, with_flags
from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError, ModelError
from tandem.models.quantized import BLOCKS
from tandem.models.slice_plans import check_sliceable
from tandem.plan import seed_tables
from tandem.plan.again import predict_again
from tandem.plan.auto_layout import choose_layout
from tandem.plan.grade import grade_table, grade_values, refit
from tandem.plan.layout_flags import memory_bytes, take_layout_flags
from tandem.plan.layouts import Laid
from tandem.plan.plan_command import asked_of
from tandem.predict.constants import SHIPPED
from tandem.predict.hardware import as_values, find_hardware
from tandem.predict.machine import MACHINE_FILE
from tandem.predict.models import shape_for
from tandem.predict.record import Outcome, add_outcomes, read_outcomes
from tests.tiny import write_preferences

SHAPE = ("--shape", "layers=4,width=256,heads=4,vocabulary=8192", "--reward-model",
         "facebook/opt-350m")  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU of 8 GB whose speed is known."""
    found = replace(
        find_hardware("1xH100"), kind="cpu", name="this machine (test)", memory=8e9, packs=True,
        flops={"fp32": 8e10, "bf16": 8e10}, bandwidth=2e10, link=1e9, call=1.5e-6, process=3.5e8,
    )  # fmt: skip
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(as_values(found)))
    monkeypatch.setenv(MACHINE_FILE, str(file))


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["plan", *args])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("family", "said"),
    [("minimax", "layers of linear_attention are counted as attention"), ("phi3", "")],
)
def test_layers_that_are_not_counted_are_named(
    family: str,
    said: str,
    machine: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(family, num_attention_heads=2, num_key_value_heads=2, **sizes)
    config.save_pretrained(tmp_path / family)
    flags = ("--actor-model", str(tmp_path / family), "--no-data")
    code, out, err = run(capsys, *flags)
    assert (code, err) == (0, "")
    assert "times: " in out
    assert said in " ".join(out.split())
    assert ("are counted as attention" in " ".join(out.split())) == bool(said)


def test_a_plan_of_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "--actor-model", "facebook/opt-1.3b", "--reward-model", "facebook/opt-350m",
        "--hardware", "8xA100-80G", "--price", "2.10",
    )  # fmt: skip
    assert (code, err) == (0, "")
    for part in ("plan for 8 x A100-80G, bf16", "generate", "MFU", "fits", "  yes ", "$2.1 per"):
        assert part in out
    assert "…" not in out  # whole lines: it is no terminal
    assert sum(line.startswith("rows: ") for line in out.splitlines()) == 1


def test_json_says_the_same_and_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--actor-model", "facebook/opt-66b", "--hardware", "1xL4", "--stages", "sft",
        "--json",
    )  # fmt: skip
    told = json.loads(out)
    assert code == 1
    assert not told["fits"]
    (stage,) = told["stages"]
    phase = stage["phases"][stage["peak_phase"]]
    assert sum(phase["parts"].values()) == pytest.approx(phase["live_bytes"], rel=0.01)
    assert any("needs" in entry["why"] for entry in told["rejected"])


@pytest.mark.usefixtures("machine")
def test_an_empty_value_is_written_as_a_shell_takes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("--lora-rank", "8", "--frozen-weights", "nf4", "--micro-batch-tokens", "1024")
    code, said, _ = run(capsys, *SHAPE, *asked)
    assert code == 0
    other = next(line for line in said.splitlines() if "--frozen-weights" in line)  # without it
    words = shlex.split(other[other.index("--frozen-weights") :])
    assert words[1] == ""
    assert "for a step of each" in other  # without data their number is not known
    assert run(capsys, *with_flags([*SHAPE, *asked], "train", words))[0] == 0


@pytest.mark.usefixtures("machine")
def test_no_layout_is_advised_that_the_run_s_other_knobs_exclude(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Adapters, beside a reference that moves a part of the way."""
    asked = (*SHAPE[:2], "--stages", "dpo", "--reference.update-every", "4")
    for rate, has_adapters in (("1", True), ("0.5", False)):
        code, said, _ = run(capsys, *asked, "--reference.update-rate", rate)
        assert code == 0
        assert ("--lora-rank" in said) is has_adapters


@pytest.mark.usefixtures("machine")
def test_this_machine_and_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SHAPE[:2], "--data", "embedded")
    assert code == 0
    assert "this machine (test), 1 rank, fp32" in out
    assert "rows" in out
    code, out, _ = run(capsys, "--actor-model", "facebook/opt-125m", "--stages", "sft", "--largest")
    assert code == 0
    assert "facebook/opt-13b: does not fit" in out
    assert "facebook/opt-350m: fits" in out or "facebook/opt-125m: fits" in out


@pytest.mark.usefixtures("machine")
def test_a_disk_that_is_too_small_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = (*SHAPE[:2], "--no-data", "--output-dir", str(tmp_path / "run"))
    code, out, _ = run(capsys, *asked)
    assert (code, "disk:" in out) == (0, False)
    for mib, expected, said in (
        (1, 1, "free, and the models alone need"),
        (100, 0, "free, and checkpoints and models may need"),
    ):
        usage = SimpleNamespace(free=mib << 20)
        monkeypatch.setattr("tandem.predict.room.shutil.disk_usage", lambda path, u=usage: u)
        code, out, _ = run(capsys, *asked)
        assert code == expected
        assert f"disk: {tmp_path / 'run'} has {mib} MiB {said} " in out
        assert run(capsys, *asked, "--hardware", "1xH100")[1].count("disk:") == 0  # not this disk


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--hardwear", "H100"), "not a flag of tandem plan. Did you mean --hardware?"),
        ((*SHAPE, "--hardware", "9xQ1"), "with a name of V100-32G, A6000-48G"),
        (("--hardware", "H100"), "tandem plan must know the model"),
        ((), "tandem plan must know the model"),
        ((*SHAPE, "--hardware", "4xH100", "--num-gpus", "3"), "must be left out or 4"),
        ((*SHAPE, "--hardware", "H100", "--price", "nan"), "--price must be a finite number"),
        (("--shape", "layers=4,depth=3", "--hardware", "H100"), "got 'depth=3'"),
        (("--shape", "layers=4", "--hardware", "H100"), "--shape must say width"),
        (("--actor-model", "no/such", "--hardware", "H100"), "a hub name in the hub's cache"),
        ((*SHAPE, "--hardware", "H100", "--memory-limit", "much"), "a size such as 2GiB"),
        (("--grade", "nowhere"), "got none"),
        (("--refit",), "--refit must get folders"),
    ],
)
def test_mistakes_get_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], part: str
) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert part in err
    assert len(err.strip().splitlines()) == 1


def test_a_plan_does_not_wait_for_torch() -> None:
    script = (
        "import sys; from tandem.cli import main; main(['plan', '--actor-model', "
        "'facebook/opt-125m', '--hardware', 'H100', '--stages', 'sft', '--json']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_the_seeds_tables_reach_the_goals() -> None:
    rows = seed_tables.table_rows()
    assert len(rows) == 23
    assert sum(abs(row["ratio"] - 1) <= 0.25 for row in rows) >= 16
    assert sum(abs(row["ratio"] - 1) <= 0.5 for row in rows) >= 20
    # The constants for a hardware are fitted without it.
    cell = seed_tables.cells()[0]
    others = [c for c in seed_tables.cells() if c.hardware != cell.hardware]
    assert seed_tables.fit(others, 1000, tries=3) == seed_tables.fit(others, 1000, tries=3)


def test_the_seeds_runs_fit_in_their_own_set_up() -> None:
    rows = seed_tables.table_rows()
    assert [row["model"] for row in rows if row["tandem_hours"] is None] == []
    large = next(r for r in rows if (r["gpus"], r["model"]) == (8, "66b"))
    assert "--inference-tp-size 8 --generation-batch-size" in large["tandem_layout"]
    for adapters, rank in ((False, 0), (True, 128)):
        config = seed_tables._tandem_config("bf16", adapters=adapters)
        assert (config.ppo.prompts_per_step, config.ppo.minibatch_size) == (1024, 1024)
        assert (config.ppo.epochs, config.sampling.max_new_tokens) == (1, 256)
        assert config.lora.rank == rank


ANSWERS = ("--actor-model", "facebook/opt-13b", "--reward-model", "facebook/opt-350m", "--stages",
           "ppo", "--hardware", "1xA100-80G", "--no-data", "--dtype", "bf16", "--lora-rank", "128",
           "--max-new-tokens", "256", "--ppo.prompts-per-step", "1024", "--gradient-checkpointing",
           "--offload", "optimizer", "reward", "reference")  # fmt: skip


def _by_answers_alone(found: dict[str, Any]) -> dict[str, Any]:
    """The one layout that changes the batch of answers and nothing else."""
    alone = [one for one in found["layouts"] if list(one["changes"]) == ["generation_batch_size"]]
    assert len(alone) == 1
    assert alone[0]["fits"]
    return alone[0]


@pytest.mark.parametrize(("limit", "size"), [("75GiB", 64), ("50GiB", 32), ("40GiB", 16)])
def test_as_many_answers_at_once_as_fit(
    limit: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*ANSWERS, "--memory-limit", limit]
    assert run(capsys, *few, "--generation-batch-size", f"{size}")[0] == 0
    assert run(capsys, *few, "--generation-batch-size", f"{2 * size}")[0] == 1
    # One that is set to what does not fit stays what is planned; a smaller one is a way out.
    code, out, _ = run(capsys, *few, "--generation-batch-size", "256", "--json")
    assert code == 1
    assert _by_answers_alone(json.loads(out))["changes"] == {"generation_batch_size": size}
    _, out, _ = run(capsys, *few, "--generation-batch-size", "256")
    assert f": --generation-batch-size {size}\n" in out
    assert "most for KV memory (100 GiB)" in out
    if size < 64:
        code, out, _ = run(capsys, *few, "--json")
        assert code == 1
        assert _by_answers_alone(json.loads(out))["changes"] == {"generation_batch_size": size}


def test_more_answers_at_once_leave_memory_free(capsys: pytest.CaptureFixture[str]) -> None:
    def grown(limit: int, *flags: str) -> list[dict[str, Any]]:
        small = ["facebook/opt-1.3b" if word == "facebook/opt-13b" else word for word in ANSWERS]
        _, out, _ = run(capsys, *small, *flags, "--memory-limit", f"{limit}GiB", "--json")
        found = json.loads(out)["layouts"]
        return [one for one in found if one["changes"].get("generation_batch_size", 0) > 64]

    most = max(grown(75), key=lambda one: one["changes"]["generation_batch_size"])
    assert most["changes"]["generation_batch_size"] == 512
    for limit in (75, round(most["peak_bytes"] / 2**30)):
        assert max(one["peak_bytes"] for one in grown(limit)) <= 0.9 * limit * 2**30
    assert grown(75, "--generation-batch-size", "32") == []


def test_a_batch_of_answers_is_chosen_unless_it_is_set(machine: None, tmp_path: Path) -> None:
    def chosen(*flags: str) -> tuple[list[str], str]:
        words = ["--actor-model", "facebook/opt-125m", "--stages", "grpo", "--grpo.reward-function",
                 "tandem:length", "--output-dir", str(tmp_path / "run"), *flags]  # fmt: skip
        said = list[str]()
        words += ["--micro-batch-tokens", "512", "--lora-rank", "4"]
        config = parse_run_flags(words, "train")
        return choose_layout(config, 1, 2.0 * 2**30, said.append)[1], said[-1]

    flags, said = chosen()
    assert "--generation-batch-size" in flags
    assert " that fit (" in said
    flags, said = chosen("--generation-batch-size", "65")
    assert "--generation-batch-size" not in flags
    assert "none fits into 2.0 GiB" in said
    assert "--generation-batch-size" in said


def _tried(model: str, *flags: str) -> set[tuple[int, str]]:
    """Slices for generation and frozen weights of all layouts on eight L4."""
    config = parse_run_flags(["--actor-model", model, *flags], "train")
    found = asked_of(config, find_hardware("8xL4")).layouts(None)
    parallel = [laid.config.parallel for laid in found]
    return {(each.inference_tp_size, each.frozen_weights) for each in parallel}


def test_no_layout_has_adapters_beside_a_mixture_for_a_reference() -> None:
    own = ("--reference.update-every", "8", "--reference.update-rate")
    assert {frozen for _, frozen in _tried("Qwen/Qwen2.5-3B", *own, "0.5")} == {""}
    assert {frozen for _, frozen in _tried("Qwen/Qwen2.5-3B", *own, "1")} > {""}


def test_no_layout_slices_what_a_run_would_refuse_to_slice() -> None:
    own = ("--actor-zero-stage", "3", "--critic-zero-stage", "3")
    assert {parts for parts, _ in _tried("Qwen/Qwen2.5-7B", *own)} == {1, 2}  # 28 heads
    frozen = ("--lora-rank", "8", "--frozen-weights", "int8")
    tried = _tried("Qwen/Qwen2.5-3B", *own, *frozen)  # 5504 of 11008 are no blocks of 256
    assert {(1, "int8"), (2, "nf4")} <= tried
    assert (2, "int8") not in tried


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("phi", {}),
        ("olmo", {}),
        ("falcon", {}),
        ("xglm", {}),
        ("gptj", {}),
        ("codegen", {}),
        ("codegen", {"n_head": 4}),
        ("mixtral", {"num_local_experts": 2}),
        ("mixtral", {"num_local_experts": 2, "intermediate_size": 513}),
        ("qwen3_moe", {"num_experts": 2, "moe_intermediate_size": 513}),
        ("qwen2_moe", {"num_experts": 2, "shared_expert_intermediate_size": 513}),
        ("phi3", {"pad_token_id": 0}),
        ("phi3", {"pad_token_id": 0, "max_position_embeddings": 8192, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32, "original_max_position_embeddings": 1024}}),
    ],
)  # fmt: skip
def test_a_plan_slices_the_families_that_a_run_slices(
    model_type: str, sizes: dict[str, Any]
) -> None:
    usual = {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1,
        "num_attention_heads": 4 if "n_head" in sizes else 8, "num_key_value_heads": 8,
        "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **usual | sizes)
    try:
        check_sliceable(config, 2)
        is_taken = True
    except ModelError:
        is_taken = False
    assert shape_for(config.to_dict()).slices_into(2) == is_taken


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("heads", "keys"), [(12, 1), (12, 2), (12, 4), (12, 6), (16, 16)])
@pytest.mark.parametrize("frozen", ["", "nf4", "int8"])
def test_a_plan_slices_what_a_run_slices(parts: int, heads: int, keys: int, frozen: str) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=64 * heads, intermediate_size=1536, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=keys, vocab_size=64,
    )  # fmt: skip
    try:
        check_sliceable(config, parts, frozen)
        is_taken = True
    except ModelError:
        is_taken = False
    block = BLOCKS[frozen] if frozen else 1
    assert shape_for(config.to_dict()).slices_into(parts, block) == is_taken


def test_slices_that_a_run_would_refuse_are_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--actor-model", "Qwen/Qwen2.5-7B", "--hardware", "8xL4", "--no-data"]
    assert main(["plan", *flags, "--actor-zero-stage", "3", "--inference-tp-size", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--inference-tp-size must divide the policy's heads" in line
    assert "got 8 for 28, 4 and 18944" in line
    assert main(["plan", *flags, "--actor-zero-stage", "3", "--inference-tp-size", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--inference-tp-size must divide the ranks; got 3 for 8" in line


def test_a_family_that_is_not_sliced_gets_no_slices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xglm = str(tmp_path)
    AutoConfig.for_model(
        "xglm", d_model=256, attention_heads=8, num_layers=2, ffn_dim=512
    ).save_pretrained(xglm)
    own = ("--actor-zero-stage", "3", "--critic-zero-stage", "3")
    assert {parts for parts, _ in _tried(xglm, *own)} == {1}
    flags = ["--actor-model", xglm, "--hardware", "8xL4", "--no-data", *own]
    assert main(["plan", *flags, "--inference-tp-size", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be 1 for a model that generation cannot slice; got 2 for 'xglm'. Rem" in line


def test_an_unknown_flag_is_refused_in_the_name_of_the_command_that_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--temprature", "1", "--foo"]) == 2
    line = capsys.readouterr().err
    assert "--temprature is not a flag of tandem plan. Did you mean --sampling.temperature?" in line
    assert "--foo is not a flag of tandem plan. See tandem plan --help, or tandem train --" in line
    assert main(["sweep", "--sweep-dir", str(tmp_path), "--temprature", "1"]) == 2
    assert "--temprature is not a flag of tandem sweep." in capsys.readouterr().err


def test_a_layout_that_clears_a_list_is_shown_as_it_can_be_typed() -> None:
    flags = Laid({"parallel.offload": []}, RunConfig(), ()).flags()
    assert flags == "--offload ''"
    assert parse_run_flags(shlex.split(f"--actor-model x --data y {flags}"), "train")


def test_a_mistyped_size_is_told_before_this_machine_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.plan.plan_command.this_machine", None)
    monkeypatch.chdir(tmp_path)
    Path("my-model").mkdir()
    for name, meant in (
        ("my-modle", "my-model? "),
        ("facebook/opt-13", "facebook/opt-13b or facebook/opt-1.3b"),
        ("Qwen/Qwen2.5-7", "Qwen/Qwen2.5-7B or Qwen/Qwen2.5-7"),
        ("opt-1.3b", "facebook/opt-1.3b or facebook/opt-13b"),
    ):
        assert main(["plan", "--actor-model", name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"got none of them. Did you mean {meant}" in line
    assert main(["plan", "--actor-model", "unheard/of"]) == 2
    assert "These are facebook/opt-125m, " in capsys.readouterr().err


def test_layout_flags_are_taken_off() -> None:
    options, rest = take_layout_flags(["--seed", "3", "--auto-layout", "--memory-limit=1.5GiB"])
    assert (options.auto, options.limit, rest) == (True, 1.5 * 2**30, ["--seed", "3"])
    assert memory_bytes("800MB") == 8e8
    assert memory_bytes("2g") == 2**31
    for small in ("24", "1000", "0.5MiB", "0", "x"):
        with pytest.raises(ConfigError, match=f"a size such as 2GiB .*; got '{small}'"):
            memory_bytes(small)
    with pytest.raises(ConfigError, match="must go with --auto-layout"):
        take_layout_flags(["--memory-limit", "1GiB"])
    with pytest.raises(ConfigError, match="--memory-limit must be given once"):
        take_layout_flags(["--auto-layout", "--memory-limit=1GiB", "--memory-limit", "2GiB"])


@pytest.mark.usefixtures("machine")
def test_the_fastest_layout_that_fits_is_taken_and_kept(tmp_path: Path) -> None:
    flags = ["--actor-model", "facebook/opt-125m", "--stages", "sft", "--output-dir",
             str(tmp_path / "run")]  # fmt: skip
    config, said = parse_run_flags(flags, "train"), list[str]()
    free, chosen = choose_layout(config, 1, None, said.append)
    assert (free, chosen) == (config, [])
    tight, chosen = choose_layout(config, 1, 4.5 * 2**30, said.append)
    assert tight.micro_batch_tokens < config.micro_batch_tokens
    assert "--micro-batch-tokens" in chosen
    assert "faster, but too large" in said[-1]
    smallest, _ = choose_layout(config, 1, 2**20, said.append)
    assert "none fits into 1 MiB a rank" in said[-1]
    assert "the cheapest ways out: --" in said[-1]
    assert smallest.micro_batch_tokens <= tight.micro_batch_tokens
    # A run that has begun keeps its own.
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "command.txt").write_text("x\n")
    (folder / "config.yaml").write_text(dump_config(tight))
    kept, chosen = choose_layout(config, 1, 2**40, said.append)
    assert kept == tight
    assert "has begun" in said[-1]


def test_runs_are_graded_and_constants_fitted(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        known = Outcome(
            stage="sft", phase="train", ranks=1, hardware="this machine (test)", dtype="fp32",
            predicted_bytes=4.3e8, measured_bytes=4e8, predicted_seconds=number,
            cpu_seconds=2.0 * number + 1e-3, measured_seconds=9.0, process_bytes=3e8,
            terms={"activations": number, "fixed": 1e-3},
        )  # fmt: skip
        evaluated = replace(known, phase="evaluate", cpu_seconds=3.0 * number + 1e-3)
        add_outcomes(folder, [known, evaluated, replace(known, phase="stage", terms={})])
    folders = sorted(tmp_path.glob("run*"))
    table = grade_table(folders)
    assert "peak memory: 3 of 3 within 10%" in table
    assert "time of a step's phase: 0 of 3 within 25%" in table
    assert "time of evaluations: 0 of 3 within 25%" in table
    first = grade_values(folders)[0]
    assert (first["run"], first["stage"], first["measured_bytes"]) == ("run1", "sft", 4e8)
    assert first["memory_error"] == pytest.approx(4.3 / 4 - 1)
    assert first["time_errors"] == {
        "train": pytest.approx(1 / 2.001 - 1), "evaluate": pytest.approx(1 / 3.001 - 1)
    }  # fmt: skip
    fitted = refit(folders)["cpu"]
    assert fitted["train"]["activations"] == pytest.approx(2, rel=0.05)
    assert fitted["evaluate"]["activations"] == pytest.approx(3, rel=0.05)
    assert fitted["fitted_on"] == "3 runs on test"
    for folder in folders:
        found = read_outcomes(folder)
        add_outcomes(folder, [replace(o, hardware="this machine (Intel)") for o in found])
    again = refit(folders)
    assert again["cpu Intel"]["train"]["activations"] == pytest.approx(2, rel=0.05)
    shipped = yaml.safe_load(SHIPPED.read_text("utf-8"))
    assert again["cpu"] == shipped["cpu"]
    # Kinds of processors that were measured are fitted each to its own runs.
    for folder, kind in zip(folders, ("Zen 8 with AVX2", "Zen 8 with AVX2", "Zen 9"), strict=True):
        found = [replace(o, hardware=f"this machine (CPU: {kind})") for o in read_outcomes(folder)]
        add_outcomes(folder, found)
    again = refit(folders)
    assert again.keys() - shipped.keys() == {"cpu Zen 8 with AVX2", "cpu Zen 9"}
    assert again["cpu Zen 8 with AVX2"]["fitted_on"] == "2 runs on CPU: Zen 8 with AVX2"
    assert again["cpu"] == shipped["cpu"]


def test_a_run_is_predicted_again_and_keeps_what_was_measured(tmp_path: Path) -> None:
    flags = ["--actor-model", "facebook/opt-125m", "--stages", "sft"]
    (tmp_path / "config.yaml").write_text(dump_config(parse_run_flags(flags, "train")))
    rows = {"count": 10, "tokens": 100.0, "answered": 50.0, "longest": 120}
    whole = Outcome(
        stage="sft", phase="stage", ranks=1, hardware="H100", dtype="bf16", predicted_bytes=1.0,
        measured_bytes=3e9, rows=rows,
    )  # fmt: skip
    add_outcomes(
        tmp_path, [whole, replace(whole, phase="train", rows={}), replace(whole, phase="?")]
    )
    predict_again(tmp_path, find_hardware("1xH100"))
    found = {outcome.phase: outcome for outcome in read_outcomes(tmp_path)}
    assert found["stage"].measured_bytes == 3e9
    assert found["stage"].predicted_bytes > found["stage"].live_bytes > 1e9
    assert found["stage"].predicted_seconds == found["train"].predicted_seconds
    assert found["train"].terms["products"] > 0
    assert found["?"].predicted_bytes == 1.0  # a phase that is not predicted


@pytest.mark.usefixtures("machine")
def test_evaluations_and_the_comparison_have_their_place_in_the_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = write_preferences(tmp_path / "prefs.jsonl", 200)
    asked = [*SHAPE, "--data", data, "--heldout", "0.2", "--sft.max-steps", "5"]
    asked += ["--sft.epochs", "9", "--sft.batch-size", "8", "--stages", "sft", "reward"]
    asked += ["--sft.eval-every", "2"]
    code, said, _ = run(capsys, *asked)
    assert code == 0
    (line,) = (line for line in said.splitlines() if line.startswith("sft: "))
    assert "5 steps of " in line
    assert re.search(r"4 evaluations of [\d.]+ s \(\d+ texts\), in all ", line)
    assert re.search(r"comparison at the end: 1 model \(.* each\), [\d.]+ s, the run ", said)
    assert "without evaluations" not in said
    values = json.loads(run(capsys, *asked, "--json")[1])
    fewer = json.loads(run(capsys, *asked[:-1], "0", "--json")[1])
    (sft, reward), (once, _) = values["stages"], fewer["stages"]
    assert (sft["evaluations"]["count"], once["evaluations"]["count"]) == (4, 2)
    each = sft["evaluations"]["each_seconds"]
    assert sft["total_seconds"] - once["total_seconds"] == pytest.approx(2 * each)
    whole = sft["total_seconds"] + reward["total_seconds"] + values["comparison_seconds"]
    (as_it_is,) = (way for way in values["layouts"] if not way["changes"])
    assert as_it_is["seconds"] == pytest.approx(whole)
    _, said, _ = run(capsys, *SHAPE, "--no-data", "--stages", "sft", "--sft.max-steps", "5")
    assert "without evaluations, whose rows are not known" in said
    assert "comparison at the end" not in said
