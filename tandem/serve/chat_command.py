"""The flags of `tandem chat`."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.config.load import check_ranges
from tandem.config.pages import Parser, home_path
from tandem.config.spellings import listed
from tandem.config.stages import latest_first
from tandem.errors import ConfigError
from tandem.imports import loading
from tandem.serve.serve_command import check_place, place_flags


def chat_command(args: Sequence[str]) -> int:
    """Parse the flags and talk; returns the exit code.

    Raises:
        ConfigError: a flag is wrong.
        ModelError: the path offers no model, or it cannot be loaded.
    """
    parser = Parser(
        "chat",
        "PATH [flags]",
        "Talk to a model in the terminal; /help inside lists the commands.",
        "tandem chat runs/first --model sft --temperature 0.2",
    )
    models = f"Which model of a run: {listed([*latest_first(), 'base'])}."
    nucleus = "Sample from the smallest set of tokens with this total probability."
    code = "Run the model's own Python code."
    parser.section("model")
    parser.flag("PATH", "A run's folder, a model's folder or a hub name.", type=home_path)
    parser.flag("--model NAME", models, shown="the first of these that is finished")
    parser.flag("--system TEXT", "System prompt.", shown="none")
    calls = "Python functions that it may call, as file.py:name (docs/tools.md)."
    parser.flag("--tools NAME ...", calls, [], shown="none", type=home_path, nargs="+")
    place_flags(parser, "bf16 on a GPU and for a model saved in it, else fp32.")
    parser.flag("--trust-remote-code", code, False, shown="off", action="store_true")
    parser.section("sampling")
    parser.flag("--temperature X", "Logits are divided by this; 0: the likeliest token.", 0.7)
    parser.flag("--top-p X", nucleus, 0.95)
    parser.flag("--max-new-tokens N", "Longest answer, in tokens.", 256)
    parser.flag(
        "--json-schema S", "Answers are JSON of it: a file, or the schema.", "", shown="any"
    )
    parser.flag("--regex PATTERN", "Answers are what it describes.", "", shown="any")
    parser.flag("--seed N", "Seed of the sampled tokens.", 0)
    options = parser.parse_args(args)
    check_place(options)
    if options.json_schema and options.regex:
        raise ConfigError(
            f"--regex must go without --json-schema; got {options.regex!r}. Remove one."
        )
    with loading("chat"):
        from tandem.serve.chat import chat
    from tandem.config.schema import SamplingConfig
    from tandem.serve.greedy import as_drawn

    sampling = SamplingConfig(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        json_schema=options.json_schema,
        regex=options.regex,
    )
    check_ranges(as_drawn(sampling) if options.temperature == 0 else sampling)
    return chat(
        options.path,
        sampling,
        which=options.model,
        system=options.system,
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        trust_remote_code=options.trust_remote_code,
        tools=options.tools,
    )
