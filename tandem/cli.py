"""The `tandem` command: argv in, one command out. The only place that prints errors.

Nothing heavy is imported before the command is known, so help and mistakes are instant.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config import stages
from tandem.config.flags import help_page, parse_run_flags, with_flags
from tandem.config.load import show_note
from tandem.config.pages import Parser, command_lines, home_path
from tandem.config.schema import RunConfig
from tandem.config.spellings import listed
from tandem.config.stages import stage_names
from tandem.errors import ConfigError, DataError, Stopped, TandemError
from tandem.files import not_a_run
from tandem.imports import loading
from tandem.launch.failure import (
    complain,
    disk_line,
    going_on,
    leaving_at_signals,
    raising_stops,
)
from tandem.launch.flags import LaunchOptions, launch_help, take_launch_flags
from tandem.plan.layout_flags import layout_help, take_layout_flags
from tandem.process import is_launched
from tandem.text import counted, ignore_line, visible
from tandem.training.signals import outlive_readers
from tandem.version import own_version

if TYPE_CHECKING:
    from tandem.parallel.world import World

_TRAIN = "All stages from a pretrained model to an assistant: SFT, reward model, PPO."
_SUMMARIES = {
    "chat": "Talk to a run's model, or to any model folder.",
    "serve": "Serve a run's models: OpenAI's API, and a page to look, compare and vote.",
    "eval": "Compare a run's models on held-out rows or other data: perplexity, reward, answers.",
    "sample": "A model's scored answers in a file: all, best of n for SFT, or pairs for DPO.",
    "export": "The models of an unfinished stage, from one of its checkpoints.",
    "report": "Rewrite a run's one-page HTML report.",
    "vote": "Decide between answers that a run with the reward tandem:votes asks about.",
    "push": "Upload a model's folder to the Hugging Face hub, private by default.",
    "data": "`tandem data check FILE ...`: what a run would train on, row by row.",
    "demo": "All three stages on the built-in data set, in minutes, on a CPU.",
    "replay": "Repeat one step of a run: its metrics, and its tokens one by one.",
    "sweep": "One run per ZeRO stage, LoRA, offload, ...: a table of speed and memory.",
    "plan": "What a run needs before it starts: memory, time, price, and which layouts fit.",
    "doctor": "This machine: processor, C++ operations, speed, GPUs, what is missing.",
}
_HOMES = {
    "data": "tandem.data.check_command:data_command",
    "chat": "tandem.serve.chat_command:chat_command",
    "serve": "tandem.serve.serve_command:serve_command",
    "vote": "tandem.serve.vote_command:vote_command",
    "sweep": "tandem.plan.sweep_command:sweep_command",
    "plan": "tandem.plan.plan_command:plan_command",
    "doctor": "tandem.plan.doctor_command:doctor_command",
}
"""Commands that parse their own flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 found bad rows, 2 error, 130 stopped)."""
    try:
        return _reported(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # a second one, while the first was being reported
        return 130


def _reported(args: list[str]) -> int:
    """Run one command; if it fails, say why in one line."""
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        return _run(args, debug)
    except TandemError as error:
        if debug:
            traceback.print_exc()
        return complain(str(error), 2, error)
    except Stopped as stopped:
        return complain(f"{stopped}. {going_on(args)}", stopped.exit_code, stopped)
    except BrokenPipeError:
        # The reader (a pager, `head`) has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            traceback.print_exc()
        return complain(disk_line(error, args), 2, error)
    except (RuntimeError, MemoryError) as error:
        from tandem.engine.oom import is_out_of_memory
        from tandem.text import named_line

        if debug or not is_out_of_memory(error):
            raise
        line = (
            f"this run must fit in memory; got {named_line(error)[:160]!r}. Free some, "
            "use a smaller model, --lora-rank, a smaller --micro-batch-tokens, or --no-save-async, "
            "which saves a copy; finished stages and checkpoints are kept."
        )
        return complain(line, 2, error)
    except KeyboardInterrupt as error:
        found = going_on(args, " from the last checkpoint (--save-every)")
        return complain(f"stopped. {found}".rstrip(), 130, error)


def _run(args: list[str], debug: bool) -> int:
    if args[:1] == ["help"] and args[1:2] and not args[1].startswith("-"):
        args = [*args[1:], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if args[0] in ("--version", "-V"):
        print(f"tandem {own_version()}")
        return 0
    command, rest = args[0], args[1:]
    if command in (*_run_commands(), "demo", "sample", "export"):
        outlive_readers()  # a run that was stopped by `| head` is not done
    if command in _run_commands():
        return _train(command, rest, debug)
    commands: dict[str, Callable[[list[str]], int]] = {
        "eval": _eval,
        "sample": partial(_sample, debug),
        "export": partial(_export, debug),
        "report": _report,
        "demo": _demo,
        "replay": _replay,
        "push": _push,
        **{name: partial(_elsewhere, home) for name, home in _HOMES.items()},
    }
    if command not in commands:
        known = [*_run_commands(), *commands, "--help", "--version"]
        # --model is no typo of --help.
        cutoff = 0.75 if command.startswith("-") else 0.6
        near = difflib.get_close_matches(command, known, n=1, cutoff=cutoff)
        hint = f"Did you mean {near[0]}?" if near else "See tandem --help."
        if not near and command.startswith("-"):
            hint = f"Flags follow a command, as in: tandem train {command}."
        raise ConfigError(f"{command!r} is not a command. {hint}")
    own = command in ("sample", "export", "serve")  # these handle signals
    try:
        with nullcontext() if own else raising_stops(going_on(args)):
            return commands[command](rest)
    except SystemExit as shown:  # argparse leaves this way after --help
        return int(shown.code or 0)


def _run_commands() -> dict[str, str]:
    """The commands that train, with their lines in the help."""
    return {"train": _TRAIN, **{stage.name: stage.help for stage in stages.STAGES}}


def _overview() -> str:
    lines = ["usage: tandem COMMAND [flags]        tandem COMMAND --help", ""]
    commands = {**_run_commands(), **_SUMMARIES}
    lines += [line for entry in commands.items() for line in command_lines(*entry)]
    lines += [
        "",
        "--debug shows the traceback of an error. --version shows the version.",
    ]
    return "\n".join(lines)


def _train(command: str, args: list[str], debug: bool) -> int:
    if "--help" in args or "-h" in args or "--help-all" in args:
        everything = "--help-all" in args
        print(help_page(command, _run_commands()[command], everything=everything))
        print(f"\n{layout_help()}\n\n{launch_help()}")
        return 0
    layout, args = take_layout_flags(args)
    options, flags, wrong = take_launch_flags(args)
    note = ignore_line if is_launched() else show_note  # the launcher has shown it
    config = parse_run_flags(flags, command, wrong=wrong, note=note)
    if layout.auto:
        if is_launched():
            raise ConfigError(
                "--auto-layout must choose before ranks start; got a rank. Use --num-gpus in place "
                "of torchrun, or give the flags that `tandem plan` shows."
            )
        from tandem.plan.auto_layout import choose_layout

        ranks = max(1, options.num_gpus) * options.num_nodes
        config, chosen = choose_layout(config, ranks, layout.limit, print)
        args = with_flags(args, command, chosen)
    if options.is_needed and not is_launched():
        logs = os.path.join(config.output_dir, "logs")
        return _launch([command, *args], options, config, logs, debug)
    with leaving_at_signals():
        return _run_stages(command, args, config)


def _launch(
    words: list[str], options: LaunchOptions, config: RunConfig, logs: str, debug: bool
) -> int:
    """Run a command on several ranks, whose logs go into a folder."""
    from tandem.launch.run import launch

    return launch(
        ["-m", "tandem", *words, *(["--debug"] if debug else [])],
        options,
        log_folder=logs,
        device=config.device,
        patience_seconds=60 * config.parallel.timeout_minutes,
        left=lambda: _models_of(config) if words[0] in _run_commands() else (),
    )


def _models_of(config: RunConfig) -> list[str]:
    """The folders of a run's models on this machine."""
    names = [stages.stage_of(name).model_folder for name in config.stages]
    folders = [Path(config.output_dir) / name for name in names]
    return [str(folder) for folder in folders if (folder / "config.json").exists()]


def _run_stages(command: str, args: list[str], config: RunConfig) -> int:
    with loading(command):
        from tandem.training.run_stages import train

    with _among_ranks(config) as world:
        run = train(config, command=shlex.join(["tandem", command, *args]), world=world)
    run.print_line(_next_command(run.path))
    return 0


def _among_ranks(config: RunConfig) -> AbstractContextManager[World]:
    """Within: this process is one of the ranks that the launcher's environment names."""
    from tandem.devices import resolve_device
    from tandem.parallel.world import among_ranks

    return among_ranks(config.parallel, resolve_device(config.device))


def _sample(debug: bool, args: list[str]) -> int:
    from tandem.training.sample.flags import parse_sample_flags

    options, flags, wrong = take_launch_flags(args)
    settings = parse_sample_flags(flags, wrong)
    config = settings.config
    if options.is_needed and not is_launched():
        return _launch(["sample", *args], options, config, f"{settings.output}.logs", debug)
    with leaving_at_signals():
        with loading("sample"):
            from tandem.training.sample.command import sample
        with _among_ranks(config) as world:
            progress = sample(settings, world)
    if not progress.rows:
        raise DataError(
            f"{visible(str(settings.output))} must have at least one row; got none of "
            f"{counted(progress.prompts, 'prompt')}. See above what was left out, and why."
        )
    return 0


def _next_command(folder: Path) -> str:
    """What one does with a finished run: talk to its policy, or use its reward model."""
    if any((folder / name / "config.json").exists() for name in stages.policy_folders().values()):
        return f"chat:   tandem chat {shlex.quote(str(folder))}"
    (scores, *_) = stages.leaving(stages.stage_names(), "reward model")
    user = next(s.name for s in stages.of_family(stages.stage_names(), "rl"))
    model = shlex.quote(str(folder / scores.model_folder))
    return f"use it: tandem {user} --reward-model {model} --actor-model MODEL --data PROMPTS"


def _demo(args: list[str]) -> int:
    example = "tandem demo --output-dir runs/demo"
    parser = Parser("demo", "[--output-dir DIR]", _SUMMARIES["demo"], example).section("flags")
    parser.flag("--output-dir DIR", "The run's folder.", "runs/demo", type=home_path)
    folder = parser.parse_args(args).output_dir
    with loading("demo"):
        from tandem.training.demo import demo

    return 0 if demo(folder) else 1


def _elsewhere(home: str, args: list[str]) -> int:
    module, _, function = home.partition(":")
    code: int = getattr(import_module(module), function)(args)
    return code


def _eval(args: list[str]) -> int:
    parser = _run_parser("eval", "[flags]", " --data new_pairs.jsonl")
    about = (
        "Other data to evaluate on, as FILE_OR_NAME[@CONFIGURATION/SPLIT][::role=column,...]: all "
        "of their rows, recorded in RUN/evaluations."
    )
    parser.flag("--data DATA ...", about, [], shown="held-out rows", nargs="+", type=home_path)
    about = "A row of --data that cannot be used: error (stop there) or drop (count it)."
    parser.flag("--on-bad-row HOW", about, shown="the run's", choices=("error", "drop"))
    about = "Further models or adapters to compare, of the run's tokens. Nothing is written then."
    parser.flag("--model MODEL ...", about, [], shown="none", nargs="+", type=home_path)
    about = "A reward model that scores in place of the run's. Nothing is written then."
    parser.flag("--reward-model MODEL", about, shown="the run's", type=home_path)
    about = "Prompts to answer. With it nothing is written: records and report stay as they are."
    parser.flag("--prompts N", about, 0, shown="the run's ppo.eval_prompts; all of --data")
    about = "Also the best of n = 1, 2, 4 ... N samples per prompt by the reward, against its KL."
    parser.flag("--best-of N", about, 0, shown="none")
    about = "Where the run's base model is, if it was moved."
    parser.flag("--base MODEL", about, shown="recorded", type=home_path)
    options = parser.parse_args(args)
    if options.prompts < 0:
        raise ConfigError(f"--prompts must be >= 0; got {options.prompts}.")
    with loading("eval"):
        from tandem.training.comparing.eval_command import evaluate_run

    evaluate_run(
        options.run, options.prompts, options.best_of, base=options.base, data=options.data,
        models=options.model, reward_model=options.reward_model, on_bad_row=options.on_bad_row,
    )  # fmt: skip
    return 0


def _push(args: list[str]) -> int:
    from tandem.serve.push_command import push_command

    return push_command(args, _SUMMARIES["push"])


def _replay(args: list[str]) -> int:
    parser = _run_parser("replay", "--step N [flags]", " --step 12 --stage ppo")
    parser.flag("--step N", "Which step, counted from 1.", 0, shown="required", required=True)
    parser.flag("--stage NAME", f"Whose step: {listed(stage_names())}.", shown="the run's last")
    parser.flag("--rows N", "Sequences to show token by token.", 3)
    options = parser.parse_args(args)
    with loading("replay"):
        from tandem.training.replay import replay

    return replay(options.run, options.step, stage=options.stage, rows=options.rows)


def _export(debug: bool, args: list[str]) -> int:
    from tandem.training.own_folder import config_of_run

    launched, flags, wrong = take_launch_flags(args)
    parser = _run_parser("export", "--output DIR [flags]", " --output models/so-far")
    parser.flag("--output DIR", "A new folder.", "", shown="required", required=True,
                type=home_path)  # fmt: skip
    parser.flag("--stage NAME", f"Whose: {listed(stage_names())}.", shown="the unfinished one")
    parser.flag("--step N", "After which step.", -1, shown="the newest checkpoint's")
    options = parser.parse_args(flags)
    if wrong:
        raise ConfigError("; ".join(wrong))
    config = config_of_run(options.run)
    if launched.is_needed and not is_launched():
        return _launch(["export", *args], launched, config, f"{options.output}.logs", debug)
    with leaving_at_signals():
        with loading("export"):
            from tandem.training.export import export
        with _among_ranks(config) as world:
            export(options.run, options.output, stage=options.stage, step=options.step, world=world)
    return 0


def _report(args: list[str]) -> int:
    parser = _run_parser("report", "[--output FILE]")
    parser.flag("--output FILE", "Where to write it.", shown="RUN/report.html", type=home_path)
    options = parser.parse_args(args)
    if not os.path.exists(os.path.join(options.run, "config.yaml")):
        raise ConfigError(not_a_run(options.run))
    from tandem.metrics.report import REPORT_FILE, write_report

    file = options.output or os.path.join(options.run, REPORT_FILE)
    try:
        written = write_report(options.run, options.output)
    except OSError as error:
        if Path(error.filename or file) != Path(file):
            raise  # one that it reads
        rule = f"{file} must be a file that can be written; got: {error.strerror}"
        raise ConfigError(f"{rule}. Write it elsewhere by --output FILE.") from None
    print(written)
    return 0


def _run_parser(command: str, flags: str = "", example: str = "") -> Parser:
    """The parser of a command whose first argument is a run's folder."""
    usage, example = f"RUN {flags}".rstrip(), f"tandem {command} runs/first{example}"
    parser = Parser(command, usage, _SUMMARIES[command], example)
    return parser.section("run").flag("RUN", "A run's folder.", type=home_path)
