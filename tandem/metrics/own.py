"""Numbers that a program of the user's logs beside the declared ones."""

from __future__ import annotations

from tandem.config.stages import FAMILIES
from tandem.metrics.metric import Metric

OWN_PREFIX = "own/"
"""What their names begin with."""
OWN = Metric(
    f"{OWN_PREFIX}*",
    "ratio",
    FAMILIES,
    "",
    "A number of your own, which a callback (`RunState.log`), `TrackedLoop.log` or a stage of your "
    "own adds to the step's.",
    title="Own",
    chart="Numbers of your own",
)
