"""How long a stream stands still beside others: the time between two tokens of it.

Clients stream chats of 32 to 96 tokens, one after another, for some seconds. Measured are those
that ask for text alone, in three cases, by turns in every round: all ask for text alone; some of
them ask for reward, KL and values too; nobody does, but one client more sends a conversation of 200
KB again and again, half a second after each was refused for its length. A pause is the time between
two events of one stream, as a client sees it that shares the server's one core: by the clock, or in
CPU time of server and clients together, which is the same on a core that nobody else uses.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

ALONE, JUDGED, LONG = "text alone", "beside judging", "beside 200 KB conversations"
CASES = (ALONE, JUDGED, LONG)
_TURNS, _TURN = 400, "Once there was a small bird that wanted to see the sea. " * 9
_LONG_CONVERSATION = [
    {"role": "assistant" if number % 2 else "user", "content": _TURN[:500]}
    for number in range(_TURNS + 1)
]
COLUMNS = {"tokens": 0, "median": 1, "99 %": 1, "99.9 %": 1, "longest": 1}
"""What is told of pauses, and its digits; times in milliseconds."""


def summarized(pauses: Sequence[float]) -> dict[str, float]:
    """Of pauses in seconds: how many, and the median, two percentiles and the longest in ms."""
    ordered = sorted(1000 * pause for pause in pauses)

    def at(share: float) -> float:
        return ordered[int(share * (len(ordered) - 1))]

    figures = (len(ordered), statistics.median(ordered), at(0.99), at(0.999), ordered[-1])
    return dict(zip(COLUMNS, figures, strict=True))


async def pauses_of(
    port: int,
    body: dict[str, Any],
    case: str,
    clients: int,
    asking: int,
    seconds: float,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """The pauses, in seconds, of the clients that never ask: all but the first `asking`.

    Args:
        body: of a streamed chat that asks for text alone.
        seconds: by the clock. clock: of the pauses.
    """
    end = time.perf_counter() + seconds

    async def client(number: int) -> list[float]:
        found: list[float] = []
        random = Random(1000 * seed + number)
        asks = {"tandem": {"reward": True, "kl": True, "values": True}}
        while time.perf_counter() < end:
            more = asks if case == JUDGED and number < asking else {}
            own = {"max_tokens": random.randint(32, 96), "seed": random.getrandbits(30)}
            found += _between(await _events(port, body | own | more, clock))
        return found

    async def long_conversations() -> None:
        while time.perf_counter() < end:
            await _events(port, body | {"messages": _LONG_CONVERSATION}, clock, b" 400 ")
            await asyncio.sleep(0.5)

    others = [long_conversations()] if case == LONG else []
    measured = [client(number) for number in range(clients)]
    found = await asyncio.gather(*measured, *others)
    return [pause for of_client in found[asking:clients] for pause in of_client or ()]


def cpu_clock(pid: int) -> float:
    """CPU seconds of another process and this one, to the nanosecond (Linux)."""
    return time.clock_gettime(~pid << 3 | 2) + time.process_time()


def _between(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def chat_request(port: int, body: dict[str, Any]) -> bytes:
    """What goes over the wire to a server at a port of this machine."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _events(
    port: int, body: dict[str, Any], clock: Callable[[], float], status: bytes = b" 200 "
) -> list[float]:
    """When each event with text came; none where another status is expected."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat_request(port, body))
    first = await reader.readline()
    if status not in first:
        raise SystemExit(f"the server must answer with status{status.decode()}; got {first!r}.")
    times = []
    while line := await reader.readline():
        if line.startswith(b'data: {"error"'):
            raise SystemExit(f"the server must answer; got {line!r}.")
        if b'"delta":{"content":' in line:
            times.append(clock())
    writer.close()
    return times
