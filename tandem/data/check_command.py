"""The flags of `tandem data check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from tandem.config.dataset import TOKENIZERS_OWN, DataConfig
from tandem.config.load import check_ranges
from tandem.config.pages import Parser, home_path
from tandem.config.stages import DEFAULT, stage_names
from tandem.data.grades import Mode
from tandem.errors import ConfigError

_MEASURED = 2000
"""Rows that are rendered to count their tokens: each takes a millisecond or more."""


def data_command(args: Sequence[str]) -> int:
    """Run `tandem data check ARGS`; the exit code, 1 if a row is bad.

    Raises:
        ConfigError, DataError, ModelError: wrong flags, or data or tokenizer that cannot be read.
    """
    if list(args[:1]) not in (["check"], ["--help"], ["-h"], []):
        raise ConfigError(f"tandem data has one command, check; got {args[0]!r}.")
    words = [_as_here(word) for word in args[1:]] if args[:1] == ["check"] else ["--help"]
    options = _data_parser().parse_args(words)
    from tandem.data.check import check

    try:
        shares = ",".join(options.data_split)
        split = tuple(float(share) for share in shares.split(",") if shares)
    except ValueError:
        raise ConfigError(f"--data-split must be numbers like 2,4,4; got {shares!r}.") from None
    config = DataConfig(
        split=split,
        heldout=options.heldout,
        columns=tuple(options.columns),
        on_bad_row="drop",
        system_prompt=options.system_prompt,
        inline_speakers=options.inline_speakers,
        max_tokens=options.max_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        chat_template=options.chat_template,
        min_grade=options.min_grade,
    )
    check_ranges(config, "dataset.")
    if unknown := sorted({*options.stages} - {*stage_names()}):
        raise ConfigError(f"--stages must be of {', '.join(stage_names())}; got {unknown[0]!r}.")
    if options.grades not in get_args(Mode):
        raise ConfigError(
            f"--grades must be one of {', '.join(get_args(Mode))}; got {options.grades!r}."
        )
    numbers = {name: getattr(options, name) for name in ("rows", "seed", "measured")}
    if wrong := [f"--{name} must be >= 0; got {n}" for name, n in numbers.items() if n < 0]:
        raise ConfigError(f"{'; '.join(wrong)}.")
    return check(
        config,
        options.data,
        options.sft_data,
        options.eval_data,
        seed=options.seed,
        stages=options.stages,
        grades=options.grades,
        tokenizer_path=options.tokenizer,
        rows=options.rows,
        measured=options.measured,
    )


def _as_here(word: str) -> str:
    """A flag as a run has it, `--dataset.heldout`, by its name here."""
    head, mark, value = word.partition("=")
    knob = head.removeprefix("--dataset.")
    if knob == head:
        return word
    return f"--{'data-split' if knob == 'split' else knob.replace('_', '-')}{mark}{value}"


def _data_parser() -> Parser:
    parser = Parser(
        "data check",
        "DATA ... [flags]",
        "What a run would train on: the rows of each data set, used or dropped and why. The exit "
        "code is 1 if a row is bad.",
        "tandem data check prefs.jsonl chats.csv:2 --tokenizer MODEL",
    )
    columns = "Column map for files of other shapes, as role=column."
    split = "Shares of the prompts for SFT, reward model and PPO."
    tokenizer = (
        "A model's folder or hub name: show rows as tokens, count tokens and rows over limits."
    )
    parser.section("data")
    parser.flag("DATA ...", "Data sets as FILE_OR_NAME[@CONFIGURATION/SPLIT][:weight].", nargs="+")
    parser.flag("--sft-data DATA ...", "Data sets for SFT only.", [], shown="none")
    parser.flag("--eval-data DATA ...", "Data sets to evaluate on only.", [], shown="none")
    parser.flag("--columns A=B ...", columns, [], shown="none")
    parser.flag("--system-prompt TEXT", "For conversations without a system turn.", shown="none")
    lowest = "Lowest grade that SFT imitates: a number, mean, none or auto."
    inline = "Read prompts of the form Human: ... Assistant: as the turns that they show."
    parser.flag("--inline-speakers", inline, False, shown="off", action="store_true")
    parser.flag("--grades HOW", "How the reward model learns grades: pairs, regression.", "auto")
    parser.flag("--min-grade X", lowest, "auto")
    parser.section("split")
    parser.flag("--stages NAME ...", "Stages of the run.", list(DEFAULT))
    parser.flag("--data-split X ...", split, [], shown="2,4,4 among the run's stages")
    parser.flag("--heldout X", "Held-out share of the prompts.", 0.05)
    parser.flag("--seed N", "Seed of the split.", 1234)
    parser.section("examples")
    parser.flag("--rows N", "Rows to show of each data set.", 3)
    parser.section("tokens")
    parser.flag("--tokenizer PATH", tokenizer, shown="none")
    measured = "Rows whose tokens are counted, evenly spaced, besides the longest; 0: all."
    parser.flag("--measured N", measured, _MEASURED)
    template = "tokenizer (its own), a Jinja file, a folder with one, default, chatml or none."
    parser.flag("--chat-template FILE", template, TOKENIZERS_OWN, type=home_path)
    parser.flag("--max-tokens N", "The run's limit of a sequence.", 512)
    parser.flag("--max-prompt-tokens N", "The run's limit of a prompt.", 256)
    return parser
