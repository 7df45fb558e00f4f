"""Launch a program on several ranks, from one node or from each of several, and report on it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tandem.errors import ConfigError
from tandem.launch.flags import LaunchOptions
from tandem.processor import num_cores
from tandem.stopping import handling
from tandem.text import named_line, visible

if TYPE_CHECKING:
    from tandem.launch.agent import Agent
    from tandem.launch.rendezvous import ManyNodes, OneNode

    Meeting: TypeAlias = OneNode | ManyNodes

_JOIN_SECONDS = 600.0


def launch(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    log_folder: str | Path,
    device: str = "auto",
    patience_seconds: float = 1800.0,
    join_seconds: float = _JOIN_SECONDS,
    print_line: Callable[[str], None] | None = None,
    left: Callable[[], Sequence[str]] = tuple,
) -> int:
    """Run a program on all ranks; called on the main thread, once on every node.

    Args:
        command: what follows `python`: -m MODULE or SCRIPT, and arguments. Its
            torch.distributed finds the others through the environment, as under torchrun.
        log_folder: of rank-N.log, with all output but rank 0's, and every rank's tracebacks.
        device: auto, cpu or cuda; one rank per GPU if there are GPUs.
        patience_seconds: how long ranks may take to stop after Ctrl-C or SIGTERM.
        join_seconds: how long to wait for the other nodes.
        print_line: shows a line to the user; stderr if None.
        left: folders that the program has left on this machine; shown where rank 0 is elsewhere.
    Returns:
        0, the exit code of the first rank that failed, or 128 + the signal that stopped all.
    Raises:
        ConfigError: more ranks than GPUs, a launcher under another launcher, no way to meet.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--num-gpus must not be given under torchrun, which starts the ranks itself; got "
            f"{options.num_gpus}. Remove it, or start tandem without torchrun."
        )
    print_line = print_line or _print_line
    # Before torch is imported: its C++ logs every broken connection, and we report them in a line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Restarted ranks must not read the last attempt's addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    num_ranks, on_gpus = _ranks_here(options, device)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    where = "one per GPU" if on_gpus else "on the CPU with gloo"
    print_line(
        f"{num_ranks} rank{'s' if num_ranks > 1 else ''} here, {where}, OMP_NUM_THREADS {threads}; "
        f"rank 0 prints{'' if options.num_nodes == 1 else ' on its node'}, the others in "
        f"{log_folder}/rank-N.log"
    )
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from tandem.launch.agent import Agent

    meeting, local_addr = _meeting(options, join_seconds, print_line)
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=meeting,
        entrypoint=sys.executable,
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr=local_addr,
    )
    agent = Agent(
        spec,
        meeting,
        command,
        log_folder=Path(log_folder),
        print_line=print_line,
        patience_seconds=patience_seconds,
        environment={"OMP_NUM_THREADS": threads, **_interfaces(local_addr)},
    )
    with handling(agent.stop):
        code = _run(agent, meeting, options, print_line)
    if code == 0 and agent.node > 0:
        _say_finished(agent.name, left(), print_line)
    return code


def _meeting(
    options: LaunchOptions, join_seconds: float, print_line: Callable[[str], None]
) -> tuple[Meeting, str]:
    """Where the ranks meet, and this machine's address there."""
    from tandem.launch import rendezvous

    elastic = logging.getLogger("torch.distributed.elastic")  # we report in one line
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    if options.rdzv is None:
        return rendezvous.OneNode(), rendezvous.LOOPBACK
    host, port = options.rdzv
    print_line(
        f"{options.num_nodes} nodes meet at {host}:{port}; waiting {join_seconds:.0f} s for them"
    )
    local_addr = options.local_addr or rendezvous.address_towards(host, port)
    rendezvous.check_local(local_addr)
    meeting = rendezvous.ManyNodes.at(
        host, port, options.num_nodes, local_addr, join_seconds, print_line
    )
    return meeting, local_addr


def _interfaces(local_addr: str) -> dict[str, str]:
    """The network interface of an address, as gloo and NCCL read it from the environment."""
    from tandem.launch.rendezvous import interface_of

    name = interface_of(local_addr)
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {v: name for v in variables if name and v not in os.environ}


def _run(
    agent: Agent, meeting: Meeting, options: LaunchOptions, print_line: Callable[[str], None]
) -> int:
    """Run all ranks until they end; the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    from tandem.parallel.asking import NoAnswerError

    where = ":".join(map(str, options.rdzv or ()))
    try:
        result = agent.run()
    except SignalException as stopped:
        if agent.all_finished:  # before the signal
            return 0
        print_line(
            agent.last_words
            or f"stopped by {stopped.sigval.name}. The same command continues from the last "
            "checkpoint (--save-every); finished stages are kept."
        )
        return 128 + stopped.sigval
    except RendezvousTimeoutError:
        print_line(
            f"--num-nodes {options.num_nodes} must all come to the meeting at {where}; some did "
            "not in time. Start the same command on every node."
        )
        return 1
    except (RendezvousError, DistError, NoAnswerError) as error:
        print_line(
            f"the launcher that keeps the meeting at {where} is gone ({_innermost(error)}). Start "
            "the same command on every node again: it continues from the last checkpoint."
        )
        return 1
    finally:
        meeting.shutdown()
    if result is not None and not result.is_failed():
        return 0
    verdict = agent.verdict
    assert verdict is not None, "ranks that failed were judged"
    print_line(verdict.line)
    return verdict.code


def _say_finished(node: str, left: Sequence[str], print_line: Callable[[str], None]) -> None:
    places = ", ".join(map(visible, left))
    print_line(f"{node}: finished{places and f'; its models are here too: {places}'}")


def _innermost(error: BaseException) -> str:
    """The first line of the error that caused the others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return named_line(error)


def _ranks_here(options: LaunchOptions, device: str) -> tuple[int, bool]:
    """How many ranks this node runs, and whether each has a GPU."""
    import torch

    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    num_ranks = options.num_gpus or max(1, gpus)
    if num_ranks > gpus and (gpus or device == "cuda"):
        there = {0: "are none", 1: "is 1"}.get(gpus, f"are {gpus}")
        fewer = f"--num-gpus {gpus}, or " if gpus else ""
        raise ConfigError(
            f"--num-gpus must be at most the GPUs of this machine; got {num_ranks}, and there "
            f"{there}. Use {fewer}--device cpu for processes on the CPU."
        )
    return num_ranks, gpus > 0


def _print_line(line: str) -> None:
    print(f"tandem: {line}", file=sys.stderr, flush=True)
