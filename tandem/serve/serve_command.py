"""The flags of `tandem serve`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tandem.config.pages import Parser, home_path
from tandem.errors import ConfigError
from tandem.imports import loading
from tandem.stopping import leaving_at_ctrl_c


def serve_command(args: Sequence[str]) -> int:
    """Parse the flags and serve; returns the exit code.

    Raises:
        ConfigError: a flag is wrong, or the extra is not installed.
    """
    options = _parser().parse_args(args)
    limits = {"--slots": options.slots, "--max-context": options.max_context,
              "--max-new-tokens": options.max_new_tokens,
              "--prefill-tokens": options.prefill_tokens,
              "--max-body-mb": options.max_body_mb}  # fmt: skip
    for flag, value in limits.items():
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1; got {value}.")
    if options.max_queue < 0:
        raise ConfigError(f"--max-queue must be >= 0; got {options.max_queue}.")
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port must be from 0 to 65535; got {options.port}.")
    check_place(options)
    key = options.api_key or os.environ.get("TANDEM_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key must be printable ASCII; got other characters.")
    if options.runs and not Path(options.runs).is_dir():
        raise ConfigError(f"--runs must be a folder; got {options.runs!r}.")
    if options.votes and not Path(options.votes).expanduser().parent.is_dir():
        raise ConfigError(
            f"--votes must be a file in a folder that is there; got {options.votes!r}. Create the "
            "folder, or use another."
        )
    with leaving_at_ctrl_c():
        return _serve(options, key)


def _serve(options: Namespace, key: str) -> int:
    try:
        with loading("serve"):
            from tandem.serve.server import serve
            from tandem.serve.service import ServeSettings
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"tandem serve needs the package {error.name}; it is not installed. Run: pip install "
            "starlette uvicorn"
        ) from None
    settings = ServeSettings(
        path=options.path,
        base=options.base,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        trust_remote_code=options.trust_remote_code,
        slots=options.slots,
        max_queue=options.max_queue,
        max_context=options.max_context,
        max_new_tokens=options.max_new_tokens,
        prefill_tokens=options.prefill_tokens,
        max_body_bytes=options.max_body_mb << 20,
        follow=options.follow,
        api_key=key,
        host=options.host,
        allow_hosts=tuple(options.allow_host),
        allow_origins=tuple(options.allow_origin),
        votes=options.votes,
        runs=options.runs,
    )
    return serve(settings, options.port)


def place_flags(parser: Parser, auto: str) -> None:
    """The flags that say where a model is put, and in what type; `auto` says what auto takes."""
    parser.flag("--device NAME", "cpu, cuda or auto: a GPU if there is one.", "auto")
    parser.flag("--dtype NAME", f"fp32, bf16, fp16 or auto: {auto}", "auto")
    kept = "int8 or nf4: keep the weights of linear layers in 8 or 4 bits, not exactly as saved."
    parser.flag("--weights NAME", kept, "", shown="as saved")


def check_place(options: Namespace) -> None:
    """Refuse what these flags cannot be.

    Raises:
        ConfigError: a value is none of those.
    """
    choices = {
        "--device": (options.device, ("auto", "cpu", "cuda")),
        "--dtype": (options.dtype, ("auto", "fp32", "bf16", "fp16")),
        "--weights": (options.weights or "int8", ("int8", "nf4")),
    }
    for flag, (value, known) in choices.items():
        if value not in known:
            raise ConfigError(f"{flag} must be one of {', '.join(known)}; got {value!r}.")


def _parser() -> Parser:
    parser = Parser(
        "serve",
        "PATH [flags]",
        "Serve a run's models, or any model, to OpenAI's clients and to a browser.",
        "tandem serve runs/first --port 8000",
    )
    code = "Run the model's own Python code."
    follow = "Read new checkpoints and stages of a run that is training, between requests."
    parser.section("model")
    parser.flag("PATH", "A run's folder, a model's folder or a hub name.", type=home_path)
    parser.flag("--base PATH", "Where the run's base model is, if it was moved.", shown="recorded")
    parser.flag("--follow", follow, False, shown="off", action="store_true")
    auto = "a run's own, for other models bf16 on a GPU or if saved in it, else fp32."
    place_flags(parser, auto)
    parser.flag("--trust-remote-code", code, False, shown="off", action="store_true")
    parser.section("address")
    parser.flag("--host ADDRESS", "Where to listen; 0.0.0.0 for all networks.", "127.0.0.1")
    parser.flag("--port N", "Port; 0 takes any that is free.", 8000)
    key = "Ask API requests for this key; better in the variable TANDEM_API_KEY, which ps hides."
    parser.flag("--api-key KEY", key, shown="none")
    hosts = "Further names that requests may reach this server by."
    parser.flag("--allow-host NAME ...", hosts, [], shown="localhost, addresses")
    origins = "Other sites whose pages may use the API, as https://example.org."
    parser.flag("--allow-origin URL ...", origins, [], shown="none")
    parser.section("limits")
    parser.flag("--slots N", "Most answers of a model side by side.", 32)
    parser.flag("--max-queue N", "Further answers that may wait; more get status 429.", 64)
    parser.flag("--max-context N", "Most tokens of prompt and answer.", 4096)
    parser.flag("--max-new-tokens N", "Of an answer whose request does not say.", 512)
    prefill = "Of prompts, between two tokens of the answers in progress; longer ones run in parts."
    parser.flag("--prefill-tokens N", prefill, 512)
    parser.flag("--max-body-mb N", "Largest body of a request, in MiB.", 4)
    parser.section("votes")
    parser.flag("--votes FILE", "Where votes are kept, as JSONL.", shown="the run's votes.jsonl")
    parser.flag("--runs FOLDER", "Runs that the page shows, side by side.", shown="this run")
    return parser
