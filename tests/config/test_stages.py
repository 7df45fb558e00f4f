"""The table of stages: what it must be, what follows from it, and that no other file lists them."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import tandem
from tandem.cli import main
from tandem.config import stages
from tandem.config.flags import help_page, parse_run_flags
from tandem.config.load import build_config, check_config, dump_config
from tandem.config.optimizer import SupervisedConfig
from tandem.config.preferences import DPOConfig
from tandem.config.schema import RunConfig
from tandem.config.stages import STAGES, Policy, Stage, stage_of
from tandem.errors import ConfigError

PACKAGE = Path(tandem.__file__).parent

# Names of stages that mean something else where they stand, and what.
OTHERWISE = {
    "config/schema.py": ({"reward"}, "where the KL goes: ppo.kl_in"),
    "config/grpo.py": ({"grpo"}, "an algorithm: grpo.algorithm"),
    "config/parallel.py": ({"reward"}, "a role: parallel.offload"),
    "config/lora.py": ({"reward"}, "a role: parallel.offload"),
    "config/idle_flags.py": ({"reward"}, "a role: parallel.offload"),
    "engine/scoring.py": ({"reward"}, "a role"),
    "predict/memory.py": ({"reward"}, "a role"),
    "memory/steps.py": ({"reward"}, "a role"),
    "training/experience.py": ({"reward"}, "ppo.kl_in"),
    "training/scored_answers.py": ({"reward"}, "a metric"),
    "training/replay.py": ({"reward"}, "a column: a token's reward"),
    "metrics/table.py": ({"reward"}, "a metric, a group and a column"),
    "metrics/rewards.py": ({"reward"}, "a metric, a group and a column"),
    "metrics/answer_views.py": ({"reward"}, "a field of the records of answers"),
    "metrics/answer_sections.py": ({"reward"}, "a field of the records of answers"),
    "serve/run_files.py": ({"reward"}, "a field of the records of answers"),
    "serve/run_views.py": ({"reward"}, "a field of the records of answers"),
    "serve/bodies.py": ({"reward"}, "a field of the API"),
    "serve/judging.py": ({"reward"}, "a field of the API"),
    "serve/openapi.py": ({"reward"}, "a field of the API"),
    "serve/routes.py": ({"reward"}, "a field of the API"),
    "serve/server.py": ({"reward"}, "a field of the API"),
    "serve/service.py": ({"reward"}, "a field of the API"),
    "serve/sources.py": ({"reward"}, "a model's name in the API"),
    "serve/votes.py": ({"reward"}, "a field of the API"),
    "training/answer_records.py": ({"reward"}, "a field of the records of answers"),
    "training/sample/command.py": ({"reward"}, "a metric"),
    "training/sample/rows.py": ({"reward"}, "a column"),
}


def test_a_stage_is_named_in_its_own_file_and_in_the_table_alone() -> None:
    own = {
        f"{stage.prepare.partition(':')[0].replace('.', '/')}.py": stage.name for stage in STAGES
    }
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or node.value not in stages.stage_names():
                continue
            if file != "config/stages.py" and node.value != own.get(f"tandem/{file}"):
                found.setdefault(file, set()).add(str(node.value))
    assert found == {file: names for file, (names, _) in OTHERWISE.items()}


def test_online_dpo_is_made_from_every_knob_of_the_loss_on_pairs() -> None:
    of_trainer = {field.name for field in dataclasses.fields(SupervisedConfig)}
    knobs = {field.name for field in dataclasses.fields(DPOConfig)} - of_trainer
    assert {f"dpo.{name}" for name in knobs} <= set(stage_of("online-dpo").knobs)


def test_the_table_holds_together() -> None:
    names = stages.stage_names()
    assert len(set(names)) == len(names)
    labels = [policy.label for stage in STAGES for policy in stage.policies]
    assert len(set(labels)) == len(labels)
    assert "base" not in labels
    sections = build_config({})
    for place, stage in enumerate(STAGES):
        assert set(stage.after) <= set(names[:place]), "a stage starts from earlier ones"
        assert set(stage.excludes) <= set(names)
        assert hasattr(sections, stage.section)
        assert (stage.leaves == "policy") == bool(stage.policies)
    check_config(RunConfig(stages=stages.DEFAULT))


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, ...]:
    """A table of four, whatever else there is by now."""
    table = tuple(map(stage_of, ("sft", "reward", "dpo", "ppo")))
    monkeypatch.setattr(stages, "STAGES", table)
    return table


@pytest.mark.usefixtures("four")
def test_what_follows_from_the_table() -> None:
    assert stages.ways() == [["sft", "dpo"], ["sft", "reward", "ppo"]]
    assert stages.latest_first() == ["ppo", "dpo", "sft", "ema"]
    assert stages.policy_folders() == {
        "sft": "sft", "dpo": "dpo", "ppo": "ppo/actor", "ema": "ppo/ema"
    }  # fmt: skip
    assert [stage.name for stage in stages.sources("policy")] == ["sft"]
    assert [stage.name for stage in stages.sources("reward model", "ppo")] == ["reward"]
    assert stages.sources("reward model", "dpo") == []
    assert stage_of("ppo").model_folder == "ppo/actor"
    assert stage_of("reward").given == "reward_model"


def test_a_stage_starts_from_the_first_of_several_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "STAGES", (*STAGES, polish(after=("dpo", "sft"))))
    assert [stage.name for stage in stages.sources("policy", "polish")] == ["dpo", "sft"]
    assert [stage.name for stage in stages.sources("policy", "dpo")] == ["sft"]
    assert ["sft", "dpo", "polish"] in stages.ways()


def test_a_further_stage_is_a_command_and_a_step_with_help_and_advice(
    four: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"stages must be one of sft, reward, dpo, ppo; got \['polish'\]"
    ):
        build_config({"stages": ["polish"]})
    monkeypatch.setattr(stages, "STAGES", (*four, polish()))
    assert build_config({"stages": ["sft", "polish"]}).stages == ("sft", "polish")
    with pytest.raises(ConfigError, match=r"did you mean polish\?"):
        build_config({"stages": ["polsh"]})
    assert main(["--help"]) == 0
    assert "  polish   Once more, with care." in capsys.readouterr().out
    assert main(["polish", "--help"]) == 0
    assert "--sft.epochs X" in (page := capsys.readouterr().out)
    assert "--dpo.beta" not in page
    assert main(["polsh"]) == 2
    assert "Did you mean polish?" in capsys.readouterr().err


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("reward", "sft"), "in the order sft reward ppo, or sft dpo; got reward sft"),
        (("sft", "dpo", "ppo"), "dpo and ppo both start from sft: run them in two folders"),
    ],
)
def test_stages_that_cannot_be_in_one_run_are_refused(names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^stages must be .*{problem}$"):
        check_config(RunConfig(stages=names))


def polish(after: tuple[str, ...] = ("sft",)) -> Stage:
    return Stage(
        name="polish",
        title="Polishing",
        short="Polished",
        help="Once more, with care.",
        prepare="nowhere:nothing",
        family="supervised",
        share="texts",
        section="sft",
        after=after,
        policies=(Policy("polish"),),
    )


def test_short_flags_set_the_section_of_the_rl_stage_that_runs(tmp_path: Path) -> None:
    flags = ["--kl-coef", "0.2", "--grpo.kl", "k2-in-loss", "--grpo-steps", "7"]
    config = parse_run_flags(["--stages", "sft,grpo", *flags], "train")
    assert (config.grpo.kl_coef, config.grpo.steps) == (0.2, 7)
    assert config.ppo == RunConfig().ppo
    file = tmp_path / "run.yaml"
    file.write_text("stages: [sft, grpo]\n", "utf-8")
    assert parse_run_flags(["--config", str(file), *flags], "train").grpo.kl_coef == 0.2
    assert parse_run_flags(["--kl-coef", "0.2"], "train").ppo.kl_coef == 0.2


def test_a_stage_can_change_defaults_of_shared_knobs(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("stages: [grpo]\n", "utf-8")
    assert parse_run_flags([], "grpo").sampling.samples_per_prompt == 8
    assert build_config({"stages": ["sft", "grpo"]}).sampling.samples_per_prompt == 8
    assert parse_run_flags([], "online-dpo").sampling.samples_per_prompt == 2
    assert parse_run_flags(["--config", str(file)], "ppo").sampling.samples_per_prompt == 1
    given = ["--sampling.samples-per-prompt", "4"]
    assert parse_run_flags([*given, "--config", str(file)], "grpo").sampling.samples_per_prompt == 4
    file.write_text("sampling: {samples_per_prompt: 2}\ngrpo: {minibatch_size: 64}\n", "utf-8")
    assert parse_run_flags(["--config", str(file)], "grpo").sampling.samples_per_prompt == 2
    with pytest.raises(ConfigError, match=r"grpo.baseline is group-mean.*got 1\. Give"):
        parse_run_flags(["--sampling.samples-per-prompt", "1"], "grpo")
    assert "[8]" in help_page("grpo", "", everything=False).split("--sampling.samples")[1]


def test_a_minibatch_that_was_not_set_is_at_most_the_rollout(tmp_path: Path) -> None:
    def size(flags: str, command: str = "grpo") -> int:
        return parse_run_flags(flags.split(), command).grpo.minibatch_size

    assert size("") == size("", "ppo") == 64
    assert size("--grpo.prompts-per-step 4") == 32
    assert size("--grpo.prompts-per-step 4 --stages sft grpo", "train") == 32
    assert size("--sampling.samples-per-prompt 2 --grpo.prompts-per-step 3") == 6
    assert size("--grpo.prompts-per-step 4 --grpo.minibatch-size 8") == 8
    assert parse_run_flags(["--ppo.prompts-per-step", "4"], "ppo").ppo.minibatch_size == 0
    with pytest.raises(ConfigError, match=r"must be at most .*\(32\); got 64. Give"):
        size("--grpo.prompts-per-step 4 --grpo.minibatch-size 64")
    with pytest.raises(ConfigError, match=r"grpo\.prompts_per_step must be >= 1; got 0"):
        size("--grpo.prompts-per-step 0")
    small = tmp_path / "run.yaml"
    small.write_text("stages: [grpo]\ngrpo: {prompts_per_step: 4}\n", "utf-8")
    assert size(f"--config {small}") == 32
    assert size(f"--config {small} --grpo.prompts-per-step 8") == 64, "it follows flags, too"
    small.write_text(
        dump_config(build_config({"stages": ["grpo"], "grpo": {"prompts_per_step": 4}}))
    )
    assert "minibatch_size: 32" in small.read_text("utf-8")
    assert size(f"--config {small}") == 32
    small.write_text("grpo: {minibatch_size: 64, prompts_per_step: 4}\n", "utf-8")
    with pytest.raises(ConfigError, match=r"must be at most .*\(32\); got 64. Give"):
        size(f"--config {small}")


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("train", "--stages sft dpo --epsilon 0.1",
         r"--epsilon must go with .* ppo.clip_ratio \(ppo\); got stages sft, dpo"),
        ("train", "--stages sft,dpo --kl-coef 0.1", "--kl-coef must go with a stage that reads"),
        ("train", "--stages sft,dpo --no-ema", "--no-ema must go with a stage that reads ppo.ema"),
        ("train", "--algorithm rloo", r"--algorithm must go with .* \(grpo\); got stages sft, rew"),
        ("sft", "--kl-coef 0.1", "--kl-coef must go with .*; got stages sft"),
        ("train", "--stages sft grpo --epsilon 0.1", "Use --grpo.clip-low and --grpo.clip-high"),
    ],
)  # fmt: skip
def test_a_short_flag_of_an_rl_stage_that_does_not_run_is_refused(
    command: str, flags: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_run_flags(flags.split(), command)
    assert "\n" not in str(raised.value)


def test_another_trainers_name_sets_the_section_of_the_rl_stage_that_runs() -> None:
    notes: list[str] = []
    flags = "--stages sft grpo --init_kl_coef 0.2 --missing_eos_penalty 2 --grpo.kl k2-in-loss"
    config = parse_run_flags(flags.split(), "train", note=notes.append)
    assert (config.grpo.kl_coef, config.grpo.missing_eos_penalty) == (0.2, 2.0)
    assert config.ppo == RunConfig().ppo
