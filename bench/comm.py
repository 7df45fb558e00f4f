"""ZeRO-3 against ZeRO++ on a slow network: step time and bytes, training steps and PPO steps.

    sudo python bench/comm.py
    sudo python bench/comm.py --megabits 1000 100 --json comm.json

Two nodes of two ranks each are two network namespaces joined by a link of limited rate (`ip` and
`tc`). The sides live in the same processes and take turns. docs/zero.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.comm_network import Node, limit, two_nodes, why_not
from bench.comm_rank import SIDES, CommWork
from bench.harness import facts, ratio

RANKS_PER_NODE = 2
MEGABYTE = 1e6
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "tie_word_embeddings": False,
}
"""A Llama of 8.7M parameters: in float32 34.7 MB, of which a step sends a few times the whole."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and show; returns what --json writes."""
    options = _options(arguments)
    refusal = why_not()
    if refusal:
        raise SystemExit(refusal)
    work = CommWork(
        shape={**SHAPE, "hidden_size": options.width, "intermediate_size": options.width * 8 // 3},
        sides=tuple(options.sides),
        train_rounds=options.train_rounds,
        ppo_rounds=options.ppo_rounds,
        rows=options.rows,
        row_tokens=64,
        num_prompts=options.rows,
        prompt_tokens=32,
        max_new_tokens=32,
        interface="node0",
        dtype=options.dtype,
    )
    console = Console(width=100)
    result: dict[str, Any] = {**facts(), "work": asdict(work), "links": {}}
    with _stopped_by_signals(), two_nodes() as nodes:
        for megabits in options.megabits:
            limit(nodes, megabits)
            console.print(f"a link of {megabits:g} Mbit/s ...", style="dim")
            result["links"][f"{megabits:g}"] = summary(_run_ranks(nodes, work), work)
    show(console, result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def summary(ranks: Sequence[dict[str, Any]], work: CommWork) -> dict[str, Any]:
    """What the first rank saw, with medians, and how many times the first side costs each other.

    node_sent_bytes: of node 0; every rank of a node sees the same.
    """
    first = ranks[0]
    for kind in ("train", "ppo"):
        for side, found in first.get(kind, {}).items():
            rounds = found["rounds"]
            names = rounds[0].keys()
            found["median"] = {
                name: statistics.median(r[name] for r in rounds)
                for name in names
                if name.endswith(("seconds", "bytes"))
            }
            tokens = work.rows * work.row_tokens
            if kind == "ppo":
                tokens = work.num_prompts * work.max_new_tokens
            found["median"]["tokens_per_second"] = tokens / found["median"]["seconds"]
            base = first[kind][work.sides[0]]["rounds"]
            found["faster"] = asdict(
                ratio([r["seconds"] for r in base], [r["seconds"] for r in rounds])
            )
            # Both nodes' ranks: what leaves a node is counted at each rank.
            found["counted_inter_node_bytes"] = sum(
                total["inter_node_bytes"]
                for rank in ranks[:RANKS_PER_NODE]
                for total in rank[kind][side]["counted"].values()
            )
    return first


def show(console: Console, result: dict[str, Any]) -> None:
    """One table of seconds and bytes, then both sides' losses side by side."""
    table = Table(box=box.SIMPLE)
    for heading in ("link", "step", "side", "seconds", "tokens/s", "faster", "MB sent", "counted"):
        left = heading in ("step", "side")
        table.add_column(heading, justify="left" if left else "right")
    for link, found in result["links"].items():
        measured = f"{link} ({found['link_megabits']:.0f})"
        for kind in ("train", "ppo"):
            for side, figures in found.get(kind, {}).items():
                median, faster = figures["median"], figures["faster"]
                table.add_row(
                    measured,
                    kind,
                    side,
                    f"{median['seconds']:.2f}",
                    f"{median['tokens_per_second']:.0f}",
                    f"{faster['median']:.2f} ({faster['least']:.2f}-{faster['most']:.2f})",
                    f"{median['node_sent_bytes'] / MEGABYTE:.1f}",
                    f"{figures['counted_inter_node_bytes'] / MEGABYTE:.1f}",
                )
    console.print(table)
    console.print(
        "link: Mbit/s asked for (and measured). MB sent: by one node, on the wire, by gloo;\n"
        "counted: if every piece goes straight to the ranks that need it."
    )
    last = list(result["links"].values())[-1]
    for kind, name in (("train", "loss"), ("ppo", "policy_loss"), ("ppo", "value_loss")):
        for side, figures in last.get(kind, {}).items():
            numbers = " ".join(f"{r[name]:.4f}" for r in figures["rounds"])
            console.print(f"{kind} {name} {side}: {numbers}")


def _run_ranks(nodes: Sequence[Node], work: CommWork) -> list[dict[str, Any]]:
    """Start every rank in its node, wait for all, read what they wrote."""
    size = RANKS_PER_NODE * len(nodes)
    script = str(Path(__file__).with_name("comm_rank.py"))
    with tempfile.TemporaryDirectory() as folder, _ended() as processes:
        Path(folder, "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
        for rank in range(size):
            node = nodes[rank // RANKS_PER_NODE]
            environment = {
                **os.environ,
                **node.environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % RANKS_PER_NODE),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
                "MASTER_ADDR": nodes[0].address,
                "MASTER_PORT": "29511",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # names of hosts, which namespaces have none of
            }
            command = node.command([sys.executable, script, folder])
            processes.append(subprocess.Popen(command, env=environment))
        while any(process.poll() is None for process in processes):
            failed = [i for i, process in enumerate(processes) if process.poll()]
            if failed:
                raise SystemExit(f"bench/comm.py: rank {failed[0]} failed; its error is above.")
            time.sleep(0.1)
        files = [Path(folder, f"rank-{rank}.json") for rank in range(size)]
        missing = [file.stem for file in files if not file.exists()]
        if missing:
            raise SystemExit(f"bench/comm.py: {missing[0]} failed; its error is above.")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@contextmanager
def _ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Within: a list for processes; none of them is left after."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Within: every signal to end ends the bench as Ctrl-C does, so that it cleans up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ZeRO-3 against ZeRO++ on a slow network.")
    parser.add_argument(
        "--megabits",
        type=float,
        nargs="+",
        default=[1000, 100],
        help="rates of the link between the nodes, one after the other",
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["zero-3", "zero++"])
    parser.add_argument("--train-rounds", type=int, default=10, help="training steps of each side")
    parser.add_argument("--ppo-rounds", type=int, default=3, help="PPO steps of each side")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step, over all ranks")
    parser.add_argument("--width", type=int, default=SHAPE["hidden_size"], help="of the model")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", type=Path, help="write every figure there")
    return parser.parse_args(arguments)  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench/comm.py: interrupted; the namespaces are removed.")
