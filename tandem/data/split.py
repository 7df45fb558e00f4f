"""Which stage a prompt belongs to, decided by the prompt's own text only.

A sample's key is the SHA-256 of the seed and its opening: the first user turn (for plain text the
whole text) in NFKC form, case folded, white space collapsed. Dialogs with the same opening get the
same key, so they are never in two places, whatever their file, order or case. Some of the key's
bits decide whether it is held out, others which stage it serves: changing the held-out share moves
no other prompt between stages.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Literal, get_args

from tandem.config import stages
from tandem.config.stages import Share, stage_of
from tandem.errors import ConfigError
from tandem.types import Sample

Place = Literal[Share, "heldout"]
"""Where a row may go: a share, or the held-out rows."""
SHARES: tuple[Share, ...] = get_args(Share)
"""SFT's texts, the pairs of reward model and DPO, PPO's prompts."""
DEFAULT_SHARES = (2.0, 4.0, 4.0)
"""DeepSpeed-Chat's."""
_LONG = 5000
"""Texts up to this many characters are normalized as they are, within milliseconds."""


def opening(sample: Sample) -> str:
    """The normalized text that decides a sample's place."""
    first = next((turn.content for turn in sample.prompt if turn.role == "user"), sample.text or "")
    if len(first) > _LONG and not first.isascii():
        # Python sorts a run of combining marks in quadratic time: hours for a hostile megabyte.
        # So split runs that no script has, as in Unicode's Stream-Safe Text Format (UAX 15, 13).
        first = _mark_runs().sub("\\g<0>\u034f", first)
    return " ".join(unicodedata.normalize("NFKC", first).casefold().split())


@cache
def _mark_runs() -> re.Pattern[str]:
    """30 combining marks in a row, followed by another."""
    marks = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.combining(chr(code))]
    anyone = f"[{''.join(marks)}]"
    return re.compile(f"{anyone}{{30}}(?={anyone})")


def split_key(sample: Sample, seed: int) -> bytes:
    """32 bytes, uniform over openings; equal for samples that must stay together."""
    return hashlib.sha256(f"{seed}\0{opening(sample)}".encode()).digest()


def content_key(sample: Sample) -> bytes:
    """32 bytes that two samples share if they are the same in every turn and answer."""
    turns = tuple(
        (
            turn.role,
            turn.content,
            *filter(None, (turn.tool_calls, turn.tool_call_id, turn.name, turn.thoughts)),
        )
        for turn in sample.prompt
    )
    tools = (sample.tools,) if sample.tools else ()
    content = (turns, sample.chosen, sample.rejected, sample.text, *tools)
    return hashlib.sha256(repr(content).encode()).digest()


def share_of(stage: str) -> Share:
    """The share of the rows that a stage trains on."""
    return stage_of(stage).share


def first_of(share: Share) -> str:
    """The first stage that trains on a share, to name the share in messages."""
    return next(stage.name for stage in stages.STAGES if stage.share == share)


def shares_among(stages: Iterable[str]) -> tuple[float, ...]:
    """The default shares of the stages that run; 0 for the others.

    Example: shares_among(["reward", "ppo"]) is (0, 4, 4).
    """
    running = {share_of(stage) for stage in stages}
    sizes = zip(SHARES, DEFAULT_SHARES, strict=True)
    return tuple(size if share in running else 0.0 for share, size in sizes)


def share_bounds(shares: Sequence[float]) -> list[float]:
    """Where each share's part of [0, 1) ends, the last one's at exactly 1.

    Example: share_bounds([2, 4, 4]) is [0.2, 0.6, 1.0]. `sum` would not do for the whole: from
    Python 3.12 on it rounds less than `accumulate`, and the last share might end below 1.
    """
    ends = list(accumulate(shares))
    return [end / ends[-1] for end in ends]


class Split:
    """Shares of the prompts, as configured.

    Args:
        shares: relative sizes for SFT, reward model and PPO, on any scale.
        heldout: share in [0, 1) of all rows, taken first.
    Raises:
        ConfigError: not three finite shares of at least 0 with a sum above 0.
    """

    def __init__(self, shares: Sequence[float], heldout: float) -> None:
        usable = all(math.isfinite(share) and share >= 0 for share in shares)
        if len(shares) != len(SHARES) or not usable or sum(shares) <= 0:
            raise ConfigError(
                f"dataset.split must be three shares of at least 0 with a sum above 0; "
                f"got {','.join(map(str, shares))}. Write for example 2,4,4."
            )
        self._heldout = heldout
        self._bounds = share_bounds(shares)

    def place_of(self, key: bytes) -> Place:
        """The share of samples with this `split_key`, or "heldout"."""
        if _unit(key[:8]) < self._heldout:
            return "heldout"
        draw = _unit(key[8:16])
        return next(s for s, bound in zip(SHARES, self._bounds, strict=True) if draw < bound)


def copies(weight: float, content: bytes, seed: int) -> int:
    """How often a row with this `content_key` comes per epoch at this weight.

    floor(weight) times, and once more with the remainder as probability, drawn from the row's own
    content, so the mean over rows is the weight and the draw is stable.
    """
    whole = math.floor(weight)
    draw = hashlib.sha256(f"weight\0{seed}\0".encode() + content).digest()
    return whole + (_unit(draw[:8]) < weight - whole)


def _unit(bits: bytes) -> float:
    """8 bytes as a number in [0, 1); 53 bits, so that it never rounds up to 1."""
    return (int.from_bytes(bits, "big") >> 11) / 2**53
