"""Tandem's server against `transformers serve` and llama.cpp's: tokens per second, first token.

    python bench/serve.py --clients 1 16 64 --clock cpu --json serve.json
    python bench/serve.py --llama-server llama.cpp/build/bin/llama-server

All serve one folder of a random Llama (or --model FOLDER), in a process of their own, with the same
threads: `transformers serve` as it is, and with continuous batching over the KV memory that this
bench needs (left to itself it takes gigabytes, and minutes per answer); llama.cpp a GGUF file, in
fp32 (pip install gguf; bench/xllamacpp_server.py where llama.cpp is not built). Clients send one
streamed chat after another over their own connections. With --clock cpu rates are per CPU second of
the server's process, which a busy machine does not change; the time to the first token is always on
the clock. Another side asks Tandem for reward and KL beside each answer, from a run's folder with a
reward model and an SFT model of the same size; its cost is what a token takes beside one of plain
chat. --pauses N measures how long streams stand still instead, N of the clients asking for reward,
KL and values (bench/pauses.py).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import SHAPES
from bench.pauses import CASES, COLUMNS, chat_request, cpu_clock, pauses_of
from bench.pauses import summarized as summarized_pauses
from bench.ports import free_port
from bench.report import Report, count, parser, table
from tandem.config.load import build_config, dump_config
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.models.load import load_causal_lm, load_tokenizer, new_causal_lm
from tandem.models.save import save_model
from tandem.models.scalar import new_scalar_model

START_SECONDS = 600.0
JUDGED, BATCHING = "tandem with reward and KL", "transformers, batching"
SIDES = ("tandem", "transformers", BATCHING, JUDGED, "llama.cpp")
_PROMPT = "Tell me a long story about a small bird that wanted to see the other side of the sea. "


@dataclass(frozen=True)
class Measured:
    """One round of one side: tokens that came, seconds on the clock and of the server's CPU, and
    each request's seconds to its first token."""

    tokens: int
    wall: float
    cpu: float
    first: list[float]


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every side at every number of clients; returns what is written as JSON."""
    made = parser(__doc__, "rounds threads dtype")
    made.add_argument("--clients", nargs="+", type=count, default=[1, 16, 64])
    made.add_argument("--requests", type=count, default=4, help="of each client in a round")
    made.add_argument("--max-tokens", type=count, default=64, help="of an answer")
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama-2.2m")
    made.add_argument("--model", type=Path, help="a folder with a chat template, not a random one")
    made.add_argument("--llama-server", type=Path, help="llama.cpp's; without it, left out")
    made.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    made.add_argument("--pauses", type=count, metavar="N", help="clients that ask; see above")
    made.add_argument("--seconds", type=float, default=20.0, help="of a round, with --pauses")
    made.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="of the rates, or the pauses"
    )
    options = made.parse_args(args)
    if options.tiny:
        options.clients, options.requests, options.max_tokens = [1, 2], 1, 4
        options.clients = [2] if options.pauses else options.clients
        options.shape, options.seconds = "a", 1.0
    if options.pauses and options.pauses >= min(options.clients):
        made.error("--pauses must leave clients of --clients that do not ask")
    report = Report(options)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _make_models(folder, options)
        if options.pauses:
            report.result["pauses"] = _measure_pauses(folder, options, report)
            return report.end()
        report.result["rounds"] = {
            side: _measure(side, folder, options, report) for side in options.sides
        }
    report.result["summary"] = summarized(report.result["rounds"], options.clock)
    report.result["cost_of_reward_and_kl"] = costs(report.result["summary"])
    report.console.print(_table(report.result["summary"], options))
    return report.end()


def summarized(rounds: Any, clock: str) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by side and number of clients."""
    return {
        side: {
            clients: {
                "tokens_per_second": statistics.median(m.tokens / getattr(m, clock) for m in of),
                "first_token_seconds": statistics.median(
                    # 0: nothing but tokens without text came, say a control token again and again
                    [t for m in of for t in m.first if t] or [math.nan]
                ),
                "cpu_share": statistics.median(m.cpu / m.wall for m in of),
            }
            for clients, of in by_clients.items()
        }
        for side, by_clients in rounds.items()
        if by_clients
    }


def _make_models(folder: Path, options: Any) -> None:
    """A base, and a run of models of its shape if one is asked for."""
    tokenizer = load_tokenizer(str(options.model)) if options.model else build_tokenizer()

    def save(model: PreTrainedModel, place: Path) -> None:
        # Nothing ends an answer, so that all sides do the same work.
        model.config.pad_token_id = tokenizer.pad_token_id
        if getattr(model, "generation_config", None) is not None:  # a scorer has none
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = tokenizer.pad_token_id
        save_model(model, tokenizer, place)

    def policy(seed: int) -> PreTrainedModel:
        if options.model:
            return load_causal_lm(str(options.model))
        return new_causal_lm(config(), seed)

    def config() -> Any:
        if options.model:
            return AutoConfig.from_pretrained(options.model)
        shaped = {**SHAPES[options.shape], "vocab_size": len(tokenizer)}
        shaped["max_position_embeddings"] = 2048
        return AutoConfig.for_model(shaped.pop("model_type"), **shaped)

    save(policy(1), folder / "base")
    if JUDGED in options.sides or options.pauses:
        _make_run(folder, save, policy, new_scalar_model(config(), 4))
    if options.llama_server:
        script = Path(__file__).resolve().parents[1] / "examples" / "to_gguf.py"
        words = [sys.executable, str(script), str(folder / "base"), str(folder / "base.gguf")]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def _make_run(
    folder: Path,
    save: Callable[[PreTrainedModel, Path], None],
    policy: Callable[[int], PreTrainedModel],
    scorer: PreTrainedModel,
) -> None:
    """A run's folder with an SFT model, a reward model and PPO's actor."""
    save(policy(2), folder / "run/sft")
    save(policy(3), folder / "run/ppo/actor")
    save(scorer, folder / "run/reward")
    save(scorer, folder / "run/ppo/critic")
    values = {"actor_model": str(folder / "base"), "output_dir": str(folder / "run"), "data": ["x"]}
    run = build_config(values, where="bench: ")
    (folder / "run" / "config.yaml").write_text(dump_config(run), encoding="utf-8")


def _measure(side: str, folder: Path, options: Any, report: Report) -> dict[str, list[Measured]]:
    if side.startswith("transformers") and find_spec("fastapi") is None:
        report.print_line("transformers serve needs fastapi; it is not installed: left out")
        return {}
    if side == "llama.cpp" and options.llama_server is None:
        report.print_line("llama.cpp needs --llama-server: left out")
        return {}
    found: dict[str, list[Measured]] = {}
    with served(partial(_command, side, folder, options), options.threads) as (process, port):
        body = _body(side, folder, options)
        asyncio.run(_round(port, body, 1, 1))  # loads, compiles, fills caches
        for clients in options.clients:
            found[str(clients)] = []
            for number in range(options.rounds):
                cpu, wall = _cpu_seconds(process.pid), time.perf_counter()
                answers = asyncio.run(_round(port, body, clients, options.requests))
                wall, cpu = time.perf_counter() - wall, _cpu_seconds(process.pid) - cpu
                tokens = sum(tokens for tokens, _ in answers)
                measured = Measured(tokens, wall, max(cpu, 0.01), [first for _, first in answers])
                found[str(clients)].append(measured)
                report.print_line(
                    f"{side}, {clients} clients, round {number + 1}: {tokens} tokens in "
                    f"{wall:.1f} s, {cpu:.1f} CPU s"
                )
    return found


def _measure_pauses(folder: Path, options: Any, report: Report) -> dict[str, dict[str, Any]]:
    """Pauses by number of clients and case: summaries of all rounds together."""
    found: dict[str, dict[str, Any]] = {}
    command = partial(_command, JUDGED, folder, options)
    with served(command, options.threads) as (process, port):
        clock = partial(cpu_clock, process.pid) if options.clock == "cpu" else time.perf_counter
        asyncio.run(_round(port, _body(JUDGED, folder, options), 1, 1))  # loads the judges
        body = _body("tandem", folder, options) | {"model": "ppo"}
        for clients in options.clients:
            seen: dict[str, list[float]] = {case: [] for case in CASES}
            for number in range(options.rounds):
                for case in CASES:
                    wait = pauses_of(
                        port, body, case, clients, options.pauses, options.seconds, number, clock
                    )
                    seen[case] += asyncio.run(wait)
            found[str(clients)] = {case: summarized_pauses(of) for case, of in seen.items() if of}
            rows = [
                (case, *(f"{of[name]:.{digits}f}" for name, digits in COLUMNS.items()))
                for case, of in found[str(clients)].items()
            ]
            unit = "CPU ms" if options.clock == "cpu" else "ms"
            caption = f"{unit} between tokens, {clients} clients, {options.rounds} rounds of each"
            report.console.print(table("pauses", caption, ("case",), tuple(COLUMNS), rows))
    return found


def _body(side: str, folder: Path, options: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": options.max_tokens,
        "temperature": 1.0,
        "stream": True,
    }
    if side.startswith("transformers"):
        return {**body, "model": str(folder / "base")}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    if side in ("tandem", "llama.cpp"):
        return body
    return {**body, "model": "ppo", "tandem": {"reward": True, "kl": True}}


def _command(side: str, folder: Path, options: Any, port: int) -> list[str]:
    model = folder / ("run" if side == JUDGED else "base")
    if side == "llama.cpp":
        threads = str(options.threads)
        script = [sys.executable] if options.llama_server.suffix == ".py" else []
        return [*script, str(options.llama_server), "-m", str(folder / "base.gguf"),
                "--port", str(port), "-np", "64", "-c", str(64 * 512), "--jinja",
                "-t", threads, "-tb", threads, "--threads-http", "64"]  # fmt: skip
    if side.startswith("transformers"):
        words = [sys.executable, "-c", "from transformers.cli.transformers import main; main()",
                 "serve", str(model), "--device", "cpu", "--dtype", "float32",
                 "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
        if side == BATCHING:
            words += ["--continuous-batching", "--cb-block-size", "32", "--cb-num-blocks", "512",
                      "--cb-max-batch-tokens", "512"]  # fmt: skip
        return words
    return tandem_command(
        model, port, "--slots", "64", "--max-context", "2048", "--dtype", options.dtype
    )


def tandem_command(model: Path, port: int, *flags: str) -> list[str]:
    """The words of `tandem serve` over a folder."""
    return [sys.executable, "-m", "tandem", "serve", str(model), "--device", "cpu",
            "--port", str(port), *flags]  # fmt: skip


@contextmanager
def served(
    command: Callable[[int], list[str]], threads: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that answers, and its port; `command` makes its words of the port."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    words, quiet = command(port), subprocess.DEVNULL
    errors = quiet if "--threads-http" in words else None  # llama.cpp tells every request there
    process = subprocess.Popen(words, env=environment, stdout=quiet, stderr=errors)
    try:
        _wait_for(port, process)
        yield process, port
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server must start; it ended with code {process.returncode}.")
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/health")
                is_up = connection.getresponse().status == 200
        except OSError:
            is_up = False
        if is_up:
            return
        time.sleep(0.2)
    raise SystemExit(f"the server must start within {START_SECONDS:.0f} s; it did not.")


async def _round(
    port: int, body: dict[str, Any], clients: int, requests: int
) -> list[tuple[int, float]]:
    """Each request's tokens and seconds to the first."""

    async def client(number: int) -> list[tuple[int, float]]:
        seeded = [{**body, "seed": 1000 * number + i} for i in range(requests)]
        return [await _answer(port, each) for each in seeded]

    answers = await asyncio.gather(*(client(number) for number in range(clients)))
    return [answer for of_client in answers for answer in of_client]


async def _answer(port: int, body: dict[str, Any]) -> tuple[int, float]:
    request = chat_request(port, body)
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    tokens = usage = 0
    first = 0.0
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server must answer with status 200; got {status!r}.")
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise SystemExit(f"the server must answer; got {chunk['error']}.")
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            tokens += 1
            first = first or time.perf_counter() - begun
        usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
    writer.close()
    return usage or tokens, first


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process with all its threads, and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def costs(summary: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """What a token costs with reward and KL beside the answer, over plain chat, by clients."""
    plain, judged = summary.get("tandem", {}), summary.get(JUDGED, {})
    return {
        clients: plain[clients]["tokens_per_second"] / found["tokens_per_second"]
        for clients, found in judged.items()
        if clients in plain
    }


def _table(summary: dict[str, dict[str, dict[str, float]]], options: Any) -> Any:
    rows = []
    theirs = [found for side, found in summary.items() if side.startswith("transformers")]
    cost = costs(summary)
    for side, by_clients in summary.items():
        for clients, found in by_clients.items():
            against = [of[clients]["tokens_per_second"] for of in theirs if clients in of]
            ratio = f"{found['tokens_per_second'] / max(against):.1f}" if against else ""
            rows.append(
                (side, clients, f"{found['tokens_per_second']:.0f}", ratio,
                 f"{cost[clients]:.2f}" if side == JUDGED and clients in cost else "",
                 f"{1000 * found['first_token_seconds']:.0f}", f"{found['cpu_share']:.0%}")
            )  # fmt: skip
    unit = "tokens/s" if options.clock == "wall" else "tokens/CPU s"
    caption = f"medians of {options.rounds} rounds; torch {torch.__version__}"
    right = (unit, "x faster transformers", "cost", "first token ms", "CPU")
    return table("serve", caption, ("side", "clients"), right, rows)


if __name__ == "__main__":
    main()
