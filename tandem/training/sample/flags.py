"""The flags of `tandem sample`: what answers, what scores, what is written. No torch.

Knobs are those of a run. Without a flag they are as the run's config.yaml (or --config) has them,
where sampling reads them, so that prompts are rendered and answers scored as in that run.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config.conversations import CONVERSATION_KNOBS
from tandem.config.flags import Reader, parse_run_flags, unknown_flags
from tandem.config.load import build, config_knobs, knob_value, load_config, set_knob
from tandem.config.pages import Parser, home_path, paragraph
from tandem.config.recorded import base_gone, is_gone, with_found_models
from tandem.config.schema import RunConfig, rl_section
from tandem.config.spellings import listed
from tandem.config.stages import (
    latest_first,
    leaving,
    of_family,
    policy_folders,
    rl_stage,
    stage_names,
)
from tandem.data.chat.own_template import with_kept_template
from tandem.data.reading.parts import part_of
from tandem.data.reading.sources import parse_spec
from tandem.errors import ConfigError, ModelError
from tandem.text import visible
from tandem.training.sample.rows import WRITES, Choice

_STAGE = rl_stage(())
"""The stage whose section of the knobs is read: the first that samples and scores answers."""
REWARDS = tuple(
    f"{_STAGE.section}.{name}"
    for name in ("reward_function", "reward_function_weight", "reward_model_weight")
)
"""The knobs of the reward in that section."""
_KEPT = (
    *("seed", "dtype", "trust_remote_code", "micro_batch_tokens", "hybrid_engine"),
    *("generation_batch_size", "generation_prefill_tokens", "parallel.frozen_weights"),
    *("dataset.max_prompt_tokens", "dataset.on_long_row", "dataset.system_prompt"),
    *("dataset.chat_template", "dataset.inline_speakers"),
)
"""What is taken over from a run beside `sampling` and `scoring`, where no flag says otherwise."""
_READ = (
    *(*_KEPT, *REWARDS, "reward_model", "data", "device"),
    *(f"{_STAGE.section}.{name}" for name in CONVERSATION_KNOBS),
    *("dataset.columns", "dataset.on_bad_row", f"{_STAGE.section}.prompts_per_step"),
    *("parallel.actor_zero_stage", "parallel.critic_zero_stage", "parallel.inference_tp_size"),
    *("parallel.offload", "parallel.ranks_per_node", "parallel.timeout_minutes"),
)
_NOT_READ = ("scoring.combine",)
"""A single score per answer is compared, not one within its group."""
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """What is to be sampled.

    config: `actor_model` is the policy, `reward_model` and the first RL stage's functions score.
    output: the file. choice: what is written of each prompt's answers.
    """

    config: RunConfig
    output: Path
    choice: Choice


def parse_sample_flags(args: Sequence[str], wrong: Sequence[str] = ()) -> SampleSettings:
    """Read the command line.

    Args:
        wrong: problems with the rest of it, to be reported together with these.
    Raises:
        ConfigError: all that is wrong with the flags.
        ModelError: the run has no such policy.
    """
    parser = _parser()
    args = ["--help" if word == "--help-all" else word for word in args]
    if args and args[0].startswith("-") and args[0] not in ("-h", "--help"):
        parser.refuse_typo(args[:1])
        parser.error(f"the model must come first; got {args[0]}")
    options, rest = parser.parse_known_args(args)
    run = _run_of(options.run_or_model)
    source = _policy_of(options.run_or_model, run, options.model)
    base = load_config(options.config) if options.config else run
    start = _taken_over(base) if base else RunConfig()
    if options.config and base is not None:
        start = replace(start, data=base.data)
    # Frozen weights go with adapters; sampling adds none to a model that has none.
    start = replace(start, lora=replace(start.lora, rank=(base or start).lora.rank or 1))
    reader = Reader(_STAGE.name, _is_read, _short_flags(), start)
    problems = [*wrong, *_option_problems(options)]
    try:
        config = parse_run_flags(rest, "sample", wrong=problems, reader=reader)
    except ConfigError:
        parser.refuse_typo(unknown_flags(rest))
        raise
    if not (config.reward_model or rl_section(config).reward_function):
        config = _with_own_rewards(config, base, options.run_or_model if run else "")
    config = replace(config, actor_model=source, dataset=replace(config.dataset, heldout=0.0))
    if problems := _problems(options, config):
        raise ConfigError("; ".join(problems))
    choice = Choice(
        options.write, options.min_margin or 0.0, options.min_reward, options.keep_cut_off
    )
    return SampleSettings(config=config, output=Path(options.output), choice=choice)


def _run_of(path: str) -> RunConfig | None:
    """The configuration of the run in a folder; None for anything else."""
    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        return None
    config = with_kept_template(load_config(folder / "config.yaml"), folder)
    return with_found_models(config, folder)


def _policy_of(path: str, run: RunConfig | None, which: str) -> str:
    """The model that `--model` names, or the policy of the run's last finished stage."""
    if run is None:
        if which:
            raise ModelError(
                f"--model must go with a run's folder; got {visible(path)}, which is not one. "
                "Remove --model."
            )
        return path
    folders = {name: Path(path) / folder for name, folder in policy_folders().items()}
    there = [name for name in latest_first() if _holds_model(folders[name])]
    if which == "base":
        if is_gone(run.actor_model):
            told = base_gone(visible(path), run.actor_model)
            raise ModelError(f"{told}. Give its folder in place of the run's.")
        return run.actor_model
    if which and which not in there:
        has = listed([*there, "base"])
        raise ModelError(f"--model must be one that {visible(path)} has, {has}; got {which!r}.")
    if not there:
        raise ModelError(
            f"{visible(path)} must have a finished stage with a policy; got none. Run the same "
            "tandem train command again to finish it, write out a checkpoint's with tandem export, "
            "or give --model base."
        )
    return str(folders[which or there[0]])


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", _ADAPTER))


def _with_own_rewards(config: RunConfig, base: RunConfig | None, path: str) -> RunConfig:
    """The configuration with the rewards of the run at `path` (or of --config), as `tandem eval`
    chooses them: its reward model once there is one, and the functions of its RL stage."""
    if base is None:
        return config
    rewarded = bool(of_family(base.stages, "rl"))
    models = [Path(path) / stage.model_folder for stage in leaving(stage_names(), "reward model")]
    found = [str(folder) for folder in models if path and _holds_model(folder)]
    given = rewarded and not leaving(base.stages, "reward model")  # else that stage's beginning
    model = (found or [base.reward_model if given else ""])[0]
    theirs, section = rl_section(base), rl_section(config)
    if rewarded:
        named = {name.partition(".")[2]: name for name in REWARDS}
        section = replace(section, **{knob: getattr(theirs, knob) for knob in named})
        model = model if theirs.reward_model_weight else ""
    scoring = config.scoring
    if model and not scoring.reward_models:
        scoring = replace(scoring, reward_models=base.scoring.reward_models)
    changes: dict[str, Any] = {_STAGE.section: section, "scoring": scoring}
    return replace(config, reward_model=model, **changes)


def _is_read(name: str) -> bool:
    return name in _READ or (name.startswith(("sampling.", "scoring.")) and name not in _NOT_READ)


def _is_kept(name: str) -> bool:
    if name in ("sampling.samples_per_prompt", "scoring.reward_models"):
        return False
    return name in _KEPT or (name.startswith(("sampling.", "scoring.")) and _is_read(name))


def _taken_over(base: RunConfig) -> RunConfig:
    """The defaults, with the knobs of `base` that are kept."""
    values: dict[str, Any] = {"stages": [_STAGE.name]}
    for name, _ in config_knobs():
        if _is_kept(name):
            value = knob_value(base, name)
            set_knob(values, name, list(value) if isinstance(value, tuple) else value)
    if of_family(base.stages, "rl"):
        theirs = rl_section(base)
        for name in CONVERSATION_KNOBS:
            value = getattr(theirs, name)
            whole = list(value) if isinstance(value, tuple) else value
            set_knob(values, f"{_STAGE.section}.{name}", whole)
    return build(values)[0]


def _option_problems(options: Namespace) -> list[str]:
    """What is wrong with the command's own flags."""
    problems, write = [], options.write
    if write not in WRITES:
        problems.append(f"--write must be one of {', '.join(WRITES)}; got {write!r}")
    if not options.output.endswith(".jsonl"):
        problems.append(f"--output must end in .jsonl; got {options.output!r}")
    numbers = {"--min-margin": options.min_margin, "--min-reward": options.min_reward}
    for flag, number in numbers.items():
        if number is not None and not math.isfinite(number):
            problems.append(f"{flag} must be a finite number; got {number}")
    if options.min_margin is not None and options.min_margin < 0:
        problems.append(f"--min-margin must be >= 0; got {options.min_margin:g}")
    if options.min_margin is not None and write != "pairs":
        problems.append(f"--min-margin must go with --write pairs; got --write {write}")
    chooses = {"--min-reward": options.min_reward is not None,
               "--keep-cut-off": options.keep_cut_off}  # fmt: skip
    problems += [
        f"{flag} must go with --write best or pairs; got --write all, which writes every answer"
        for flag, given in chooses.items()
        if given and write == "all"
    ]
    return problems


def _problems(options: Namespace, config: RunConfig) -> list[str]:
    """What is wrong between the command's flags and the configuration."""
    problems: list[str] = []
    if not config.data:
        problems.append("data must name at least one data set; got none. Give --data FILE")
    if not config.actor_model:
        problems.append("the run must have a base model for --model base; got none. Name a model")
    for text in config.data:
        folder = Path(part_of(parse_spec(text).path).base)
        if folder.is_dir() and folder.resolve() in Path(options.output).resolve().parents:
            problems.append(
                f"--output must be outside of {visible(str(folder))}, whose files are read; "
                f"got {visible(options.output)}"
            )
    samples = config.sampling.samples_per_prompt
    if options.write == "pairs" and samples < 2:
        problems.append(
            f"--samples-per-prompt must be at least 2 with --write pairs; got {samples}. Give e.g. "
            "--samples-per-prompt 4"
        )
    rl = rl_section(config)
    if options.write == "pairs" and rl.converses:
        names = ", ".join(filter(None, (rl.environment, *rl.tools)))
        problems.append(
            f"--write pairs must go with single answers: conversations ({names}) have no prompt in "
            "common but the first. Give --write best"
        )
    if options.write in ("best", "pairs") and not scores(config):
        problems.append(
            f"--write {options.write} must have a reward to choose by; got none. Give "
            "--reward-model FOLDER or --reward-function FILE.py:name"
        )
    if config.scoring.reward_models and not scoring_model(config):
        problems.append(
            "scoring.reward_models must be empty without a reward model, beside which they count; "
            f"got {config.scoring.reward_models[0]}. Give it as --reward-model"
        )
    return problems


def scoring_model(config: RunConfig) -> str:
    """The reward model that scores; "" for none."""
    return config.reward_model if rl_section(config).reward_model_weight else ""


def scores(config: RunConfig) -> bool:
    """Whether a model or a function scores answers."""
    return bool(scoring_model(config) or rl_section(config).reward_function)


def _parser() -> Parser:
    parser = Parser(
        "sample",
        "RUN_OR_MODEL --data DATA ... --output FILE.jsonl [flags]",
        "A model's answers to prompts, scored, in a file: all of them, the best of n for SFT, or "
        "best against worst for DPO. The same command continues an unfinished file.",
        "tandem sample runs/first --data prompts.jsonl --output best.jsonl --samples-per-prompt 8 "
        "--write best",
    )
    number: dict[str, Any] = {"type": float, "shown": "none"}
    models = f"Which policy of a run: {listed([*latest_first(), 'base'])}."
    write = "all: one row per prompt with every answer; best: the best one, for tandem sft; pairs: "
    write += "best against worst, for tandem dpo and reward."
    cut = "Choose among answers that the length limit cut off, too."
    path = "A run's folder, a model's or an adapter's folder, or a hub name."
    parser.section("model")
    parser.flag("RUN_OR_MODEL", path, type=home_path)
    parser.flag("--model NAME", models, shown="the last that is finished")
    parser.section("files")
    parser.also("--data DATA ...", "Prompts as FILE_OR_NAME[:weight].", "required")
    output = "Where rows are written, as JSON lines; what they are made from, beside it."
    parser.flag("--output FILE", output, type=home_path, shown="required", required=True)
    parser.section("answers")
    own = "the run's, else "
    parser.also("--samples-per-prompt N", "Answers to each prompt.", "1")
    parser.also("--temperature X", "Logits are divided by this.", f"{own}1")
    parser.also("--max-new-tokens N", "Longest answer, in tokens.", f"{own}128")
    parser.also("--seed N", "Seed of every sampled token.", f"{own}1234")
    parser.section("rewards")
    parser.also("--reward-model PATH", "A reward model's folder or hub name.", "the run's")
    function = "As file.py:name, module:name or tandem:name; several are added."
    parser.also("--reward-function NAME ...", function, "the run's")
    parser.section("rows")
    parser.flag("--write WHAT", write, "all")
    least = "Pairs whose rewards differ by less are not written; equal ones never are."
    parser.flag("--min-margin X", least, None, **(number | {"shown": "0"}))
    parser.flag(
        "--min-reward X", "Rows whose best answer has less are not written.", None, **number
    )
    parser.flag("--keep-cut-off", cut, False, shown="off", action="store_true")
    parser.section("machine")
    parser.also("--device NAME", "cpu, cuda or auto: a GPU if there is one.", "auto")
    parser.also("--dtype NAME", "fp32, bf16, fp16 or auto: bf16 on a GPU, else fp32.", f"{own}auto")
    several = "Ranks on this machine, which share the prompts; --num-nodes and --rdzv as in train."
    parser.also("--num-gpus N", several, "1")
    file = "Knobs from a run's config.yaml or another such file, in place of the run's own."
    parser.flag("--config FILE", file, shown="none", type=home_path)
    parser.text(paragraph(
        "Other flags are those of tandem ppo --help-all: --top-p, --top-k (1: greedy) and the "
            "rest of sampling and scoring, --tools, --environment, --max-prompt-tokens, "
            "--on-long-row, --system-prompt, --chat-template, --columns, --on-bad-row, "
            "--prompts-per-step (prompts answered before "
            "rows are written), --generation-batch-size."
    ))  # fmt: skip
    return parser


def _short_flags() -> dict[str, str]:
    """Every knob that is read of these sections, without the section's name."""
    short = ("sampling", "scoring", "dataset", _STAGE.section)
    parts = [(name, *name.partition(".")[::2]) for name, _ in config_knobs() if _is_read(name)]
    return {n: f"--{last.replace('_', '-')}" for n, section, last in parts if section in short}
