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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.comm_network import Node, limit, two_nodes, why_not
from bench.comm_rank import SIDES, CommWork
from bench.harness import ratio
from bench.models import llama
from bench.report import Report, count, parser, table

RANKS_PER_NODE = 2
MEGABYTE = 1e6


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and show; returns what --json writes."""
    options = _options(arguments)
    refusal = why_not()
    if refusal:
        raise SystemExit(refusal)
    report = Report(options)
    # By default 8.7M parameters: in float32 34.7 MB, of which a step sends a few times the whole.
    work = CommWork(
        shape=llama(options.width, options.width * 8 // 3, 4, 6, 2048, tied=False),
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
    report.result |= {"work": work, "links": {}}
    with _stopped_by_signals(), two_nodes() as nodes:
        for megabits in options.megabits:
            limit(nodes, megabits)
            report.print_line(f"a link of {megabits:g} Mbit/s ...")
            report.result["links"][f"{megabits:g}"] = summary(_run_ranks(nodes, work), work)
            report.keep()
    show(report)
    return report.end()


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
            found["faster"] = ratio([r["seconds"] for r in base], [r["seconds"] for r in rounds])
            # Both nodes' ranks: what leaves a node is counted at each rank.
            found["counted_inter_node_bytes"] = sum(
                total["inter_node_bytes"]
                for rank in ranks[:RANKS_PER_NODE]
                for total in rank[kind][side]["counted"].values()
            )
    return first


def show(report: Report) -> None:
    """One table of seconds and bytes, then all sides' losses side by side."""
    links = report.result["links"]
    rows = []
    for link, found in links.items():
        for kind in ("train", "ppo"):
            for side, figures in found.get(kind, {}).items():
                median = figures["median"]
                rows.append(
                    (
                        f"{link} ({found['link_megabits']:.0f})",
                        kind,
                        side,
                        f"{median['seconds']:.2f}",
                        f"{median['tokens_per_second']:.0f}",
                        str(figures["faster"]),
                        f"{median['node_sent_bytes'] / MEGABYTE:.1f}",
                        f"{figures['counted_inter_node_bytes'] / MEGABYTE:.1f}",
                    )
                )
    report.console.print(
        table(
            "ZeRO-3 against ZeRO++",
            "link: Mbit/s asked for (and measured). MB sent: by one node, on the wire, by gloo; "
            "counted: if every piece goes straight to the ranks that need it",
            ("link", "step", "side"),
            ("seconds", "tokens/s", "faster", "MB sent", "counted"),
            rows,
        )
    )
    last = list(links.values())[-1]
    for kind, name in (("train", "loss"), ("ppo", "policy_loss"), ("ppo", "value_loss")):
        for side, figures in last.get(kind, {}).items():
            numbers = " ".join(f"{r[name]:.4f}" for r in figures["rounds"])
            report.print_line(f"{kind} {name} {side}: {numbers}")


def _run_ranks(nodes: Sequence[Node], work: CommWork) -> list[dict[str, Any]]:
    """Start every rank in its node, wait for all, read what they wrote; none of them is left."""
    size = RANKS_PER_NODE * len(nodes)
    script = str(Path(__file__).with_name("comm_rank.py"))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:
        Path(folder, "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
        processes = []
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
            process = subprocess.Popen(command, env=environment)
            ended.callback(process.wait)
            ended.callback(process.kill)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
        files = [Path(folder, f"rank-{rank}.json") for rank in range(size)]
        failed = [
            file.stem
            for file, process in zip(files, processes, strict=True)
            if process.poll() or (process.poll() == 0 and not file.exists())
        ]
        if failed:
            raise SystemExit(f"bench/comm.py: {failed[0]} failed; its error is above.")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


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
    flags = parser(__doc__, "dtype")
    add = flags.add_argument
    add(
        "--megabits",
        type=float,
        nargs="+",
        default=[1000, 100],
        help="rates of the link between the nodes, one after the other",
    )
    add("--sides", nargs="+", choices=SIDES, default=["zero-3", "zero++"])
    add("--train-rounds", type=int, default=10, help="training steps of each side")
    add("--ppo-rounds", type=int, default=3, help="PPO steps of each side")
    add("--rows", type=count, default=16, help="rows of a step, over all ranks")
    add("--width", type=count, default=384, help="of the model")
    options = flags.parse_args(arguments)
    if options.tiny:
        flags.set_defaults(megabits=[1000], train_rounds=2, ppo_rounds=1, width=96)
        options = flags.parse_args(arguments)
    return options


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench/comm.py: interrupted; the namespaces are removed.")
