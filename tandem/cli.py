"""The `tandem` command: argv in, one command out. The only place that prints errors.

Nothing heavy is imported before it is known what to do, so help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from tandem.config import stages
from tandem.config.flags import Parser, help_page, parse_run_flags
from tandem.config.load import check_ranges, show_note
from tandem.config.schema import RunConfig
from tandem.config.spellings import listed
from tandem.config.stages import DEFAULT, latest_first, stage_names
from tandem.errors import ConfigError, Stopped, TandemError
from tandem.launch.failure import complain, is_launched, leaving_at_signals
from tandem.launch.flags import launch_help, take_launch_flags

_TRAIN = "All steps from a pretrained model to an assistant: SFT, reward model, PPO."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 found bad rows, 2 error, 130 stopped)."""
    try:
        return _told(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # a second one, while the first was told of
        return 130


def _told(args: list[str]) -> int:
    """Run one command, and say in one line how it failed."""
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        return _run(args, debug)
    except TandemError as error:
        if debug:
            traceback.print_exc()
        return complain(str(error), 2, error)
    except Stopped as stopped:
        line = f"{stopped}. The same command continues; finished steps are kept."
        return complain(line, stopped.exit_code, stopped)
    except BrokenPipeError:
        # The reader (a pager, `head`) has what it wanted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            traceback.print_exc()
        line = f"{error.filename or 'a file'}: {error.strerror or error}"
        return complain(line, 2, error)
    except (RuntimeError, MemoryError) as error:
        from tandem.engine.oom import is_out_of_memory
        from tandem.text import named_line

        if debug or not is_out_of_memory(error):
            raise
        line = (
            f"this run must fit in memory; got {named_line(error)[:160]!r}. Free some, "
            "take a smaller model, --lora-rank or --micro-batch-tokens, or --no-save-async, which "
            "saves a copy; finished steps and checkpoints are kept."
        )
        return complain(line, 2, error)
    except KeyboardInterrupt as error:
        line = (
            "stopped. The same command continues from the last checkpoint (--save-every); "
            "finished steps are kept."
        )
        return complain(line, 130, error)


def _run(args: list[str], debug: bool) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"tandem {version('tandem-rlhf')}")
        return 0
    command, rest = args[0], args[1:]
    if command in _run_commands():
        return _train(command, rest, debug)
    commands: dict[str, Callable[[list[str]], int]] = {
        "chat": _chat,
        "eval": _eval,
        "report": _report,
        "data": _data,
        "demo": _demo,
        "sweep": _sweep,
        "replay": _replay,
    }
    if command not in commands:
        known = [*_run_commands(), *commands, "--help", "--version"]
        near = difflib.get_close_matches(command, known, n=1)
        hint = "See tandem --help."
        if near:
            hint = f"Did you mean {near[0]}?"
        elif command.startswith("-"):
            hint = f"Flags follow a command, as in: tandem train {command}."
        raise ConfigError(f"{command!r} is not a command. {hint}")
    return commands[command](rest)


def _run_commands() -> dict[str, str]:
    """The commands that train, each with its line in the help."""
    return {"train": _TRAIN, **{stage.name: stage.help for stage in stages.STAGES}}


def _overview() -> str:
    lines = ["usage: tandem COMMAND [flags]        tandem COMMAND --help", ""]
    lines += [f"  {name:8} {summary}" for name, summary in _run_commands().items()]
    lines += [
        "  chat     Talk to a run's model, or to any model folder.",
        "  eval     Compare a run's models on held-out rows, side by side.",
        "  report   Rewrite a run's one-page HTML report.",
        "  data     `tandem data check FILE ...`: what would be trained on, row by row.",
        "  demo     All three steps on the built-in data set, in minutes, on a CPU.",
        "  replay   One step of a run again, alone: its metrics, its tokens one by one.",
        "  sweep    A run per ZeRO stage, LoRA, offload, ...: one table of speed and memory.",
        "",
        "--debug shows the traceback of an error. --version shows the version.",
    ]
    return "\n".join(lines)


def _train(command: str, args: list[str], debug: bool) -> int:
    if "--help" in args or "-h" in args or "--help-all" in args:
        everything = "--help-all" in args
        print(help_page(command, _run_commands()[command], everything=everything))
        print(f"\n{launch_help()}")
        return 0
    options, flags, wrong = take_launch_flags(args)
    note = ignore_line if is_launched() else show_note  # the launcher has shown it
    config = parse_run_flags(flags, command, wrong=wrong, note=note)
    if options.is_needed and not is_launched():
        from tandem.launch.run import launch

        return launch(
            ["-m", "tandem", command, *args, *(["--debug"] if debug else [])],
            options,
            log_folder=os.path.join(config.output_dir, "logs"),
            device=config.device,
            patience_seconds=60 * config.parallel.timeout_minutes,
        )
    with leaving_at_signals():
        return _run_steps(command, args, config)


def ignore_line(line: str) -> None:
    """Takes a note that somebody else shows."""


def _run_steps(command: str, args: list[str], config: RunConfig) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"tandem {command}: loading PyTorch and transformers ...", flush=True)
    from tandem.engine.devices import resolve_device
    from tandem.parallel.watchdog import watching
    from tandem.parallel.world import join, leave
    from tandem.training.run_stages import train
    from tandem.training.signals import outlive_readers

    outlive_readers()
    world = join(
        resolve_device(config.device),
        ranks_per_node=config.parallel.ranks_per_node,
        timeout_minutes=config.parallel.timeout_minutes,
    )
    with watching(world.rank, world.size):
        run = train(config, command=shlex.join(["tandem", command, *args]), world=world)
    run.print_line(f"chat:   tandem chat {shlex.quote(str(run.path))}")
    leave()
    return 0


def _demo(args: list[str]) -> int:
    parser = _parser("demo", "All three steps on the built-in data set, on a CPU, in minutes.")
    parser.add_argument("--output-dir", type=_path, default="runs/demo", help="the run's folder")
    options = parser.parse_args(args)
    from tandem.training.demo import demo

    demo(options.output_dir)
    return 0


def _sweep(args: list[str]) -> int:
    from tandem.plan.command import sweep_command

    return sweep_command(args)


def _chat(args: list[str]) -> int:
    parser = _parser("chat", "Talk to a model; /help inside lists the commands.")
    parser.add_argument("path", type=_path, help="a run's folder, or a model's folder or hub name")
    parser.add_argument(
        "--model",
        default="",
        help=f"which of a run's: {listed([*latest_first(), 'base'])} (the first that there is)",
    )
    parser.add_argument("--system", default="", help="a system prompt")
    parser.add_argument("--temperature", type=float, default=0.7, help="0.7; lower is steadier")
    parser.add_argument("--top-p", type=float, default=0.95, help="0.95")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer, tokens")
    parser.add_argument("--seed", type=int, default=0, help="0")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    options = parser.parse_args(args)
    from tandem.config.schema import SamplingConfig
    from tandem.serve.chat import chat

    sampling = SamplingConfig(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
    )
    check_ranges(sampling)
    return chat(
        options.path,
        sampling,
        which=options.model,
        system=options.system,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
    )


def _eval(args: list[str]) -> int:
    parser = _parser("eval", "Perplexity, reward-model accuracy, and answers side by side.")
    parser.add_argument("run", type=_path, help="a run's folder")
    parser.add_argument(
        "--prompts",
        type=int,
        default=0,
        metavar="N",
        help="how many held-out prompts to answer (the run's ppo.eval_prompts)",
    )
    parser.add_argument(
        "--best-of",
        type=int,
        default=0,
        metavar="N",
        help="also the best of n = 1, 2, 4 ... N samples per prompt by the reward, against its KL",
    )
    options = parser.parse_args(args)
    if options.prompts < 0:
        raise ConfigError(f"--prompts must be >= 0; got {options.prompts}.")
    from tandem.training.eval_command import evaluate_run

    evaluate_run(options.run, options.prompts, options.best_of)
    return 0


def _replay(args: list[str]) -> int:
    parser = _parser("replay", "One step of a run again, alone; nothing in the run is changed.")
    parser.add_argument("run", type=_path, help="a run's folder")
    parser.add_argument("--step", type=int, required=True, help="which, counted from 1")
    parser.add_argument("--stage", default="", help=f"{listed(stage_names())} (the last one's)")
    parser.add_argument("--rows", type=int, default=3, help="sequences to show, token by token (3)")
    options = parser.parse_args(args)
    from tandem.training.replay import replay

    return replay(options.run, options.step, stage=options.stage, rows=options.rows)


def _report(args: list[str]) -> int:
    parser = _parser("report", "Rewrite a run's one-page HTML report.")
    parser.add_argument("run", type=_path, help="a run's folder")
    options = parser.parse_args(args)
    if not os.path.exists(os.path.join(options.run, "config.yaml")):
        raise ConfigError(f"{options.run} must be a run's folder (with config.yaml); it is not.")
    from tandem.metrics.report import write_report

    print(write_report(options.run))
    return 0


def _data(args: list[str]) -> int:
    if args[:1] != ["check"]:
        if args[:1] in (["--help"], ["-h"], []):
            print("usage: tandem data check FILE ... (see tandem data check --help)")
            return 0
        raise ConfigError(f"tandem data has one command, check; got {args[0]!r}.")
    parser = _parser("data check", "What would be trained on: rows in, used, dropped and why.")
    parser.add_argument("data", nargs="+", help="data sets as FILE_OR_NAME[:weight]")
    parser.add_argument("--sft-data", nargs="*", default=[], help="data sets for step 1 alone")
    parser.add_argument("--tokenizer", default="", help="a model's folder: show tokens and masks")
    parser.add_argument("--rows", type=int, default=3, help="example rows to show (3)")
    parser.add_argument(
        "--steps", nargs="+", default=list(DEFAULT), help=f"of the run ({' '.join(DEFAULT)})"
    )
    parser.add_argument(
        "--data-split", nargs="+", default=[], help="shares (2,4,4 among the steps of the run)"
    )
    parser.add_argument("--heldout", type=float, default=0.05, help="held-out share (0.05)")
    parser.add_argument("--columns", nargs="*", default=[], help="column map, role=column")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the split (1234)")
    options = parser.parse_args(args[1:])
    from tandem.config.schema import DataConfig
    from tandem.data.check import check

    try:
        shares = ",".join(options.data_split)
        split = tuple(float(share) for share in shares.split(",") if shares)
    except ValueError:
        raise ConfigError(f"--data-split must be numbers like 2,4,4; got {shares!r}.") from None
    config = DataConfig(
        split=split, heldout=options.heldout, columns=tuple(options.columns), on_bad_row="drop"
    )
    check_ranges(config, "dataset.")
    if strange := sorted({*options.steps} - {*stage_names()}):
        raise ConfigError(f"--stages must be of {', '.join(stage_names())}; got {strange[0]!r}.")
    if options.rows < 0 or options.seed < 0:
        raise ConfigError(f"--rows and --seed must be >= 0; got {options.rows}, {options.seed}.")
    return check(
        config,
        options.data,
        options.sft_data,
        seed=options.seed,
        steps=options.steps,
        tokenizer_path=options.tokenizer,
        rows=options.rows,
    )


def _parser(command: str, summary: str) -> argparse.ArgumentParser:
    return Parser(prog=f"tandem {command}", description=summary, allow_abbrev=False)


def _path(text: str) -> str:
    """A path as the shell would have given it: it leaves `~` alone in --flag=~/x and in quotes."""
    return os.path.expanduser(text)
