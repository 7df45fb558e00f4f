"""The flags of `tandem doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.config.pages import Parser
from tandem.imports import loading


def doctor_command(args: Sequence[str]) -> int:
    """Run `tandem doctor ARGS`; 0, or 1 where a needed package is missing."""
    parser = Parser(
        "doctor",
        "[flags]",
        "This machine: processor, C++ operations, speed, GPUs, versions, and what is missing.",
        "tandem doctor --no-speed",
    )
    off = "Do not measure products and memory, which takes about 15 s."
    parser.section("output")
    parser.flag("--json", "Print the same facts as JSON.", False, shown="off", action="store_true")
    parser.flag("--no-speed", off, True, shown="measured", action="store_false", dest="speed")
    options = parser.parse_args(args)
    # What it is doing goes to standard error: the page is for people and pipes.
    with loading("doctor", file=sys.stderr):
        from tandem.plan.doctor import doctor

    return doctor(speed=options.speed, as_json=options.json)
