"""A reward for word problems: 1 if the answer's last number is the right one, else 0.

Use it as `--ppo.reward-function tandem:exact_number` on data with an `answer`
column (GSM8K's `... #### 42` is read too).

| written | read |
| --- | --- |
| 42, 7., .5, 3.25 | as they stand |
| 1,234 and 1 234, 1'234, 1_234 (groups of three, one separator), 1.234.567 | thousands |
| 9,99; 0,125; 1.234,5 | a comma that parts no group of three is a decimal comma |
| 1,2,3 | a list: 3 |
| -5 with a hyphen, a minus sign or an en dash, -$5 | -5; after a digit, letter or closing bracket \
it is no sign: 3-5 ends in 5 |
| 2/3, \\frac{2}{3}, 1 1/2 | the quotient, unless the denominator is 0 |
| 1e3, 1.5 × 10^3, 1.5 \\times 10^{3} | 1000, 1500 |

Percent signs and units are not read. Nothing is computed: of 2^10 or 3*4 the last number counts.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

_GROUP = r"[,'’_ \u00a0\u2009\u202f]"  # what may stand between thousands
_CHAIN = rf"\d+(?:(?:\.|{_GROUP})\d+)*"  # digits with single separators: a number, or several
_WRITTEN = re.compile(
    rf"(?P<sign>(?<![\w)\]}}%.,])[-\u2212\u2013])?[$€£¥]?"
    rf"(?P<digits>{_CHAIN}|(?<!\d)\.\d+)"
    rf"(?:[eE](?P<exponent>[-+]?\d+)(?!\w)|\s?[/\u2044]\s?(?P<denominator>{_CHAIN}))?"
)
_NUMBER = re.compile(
    r"""
      (?P<plain>\d+(?:\.\d+)?|\.\d+)
    | (?P<grouped>[1-9]\d{0,2}(?:(?P<mark>"""
    + _GROUP
    + r""")\d{3})(?:(?P=mark)\d{3})*(?:\.\d+)?)
    | (?P<dotted>[1-9]\d{0,2}(?:\.\d{3}){2,}|[1-9]\d{0,2}(?:[.'\u00a0\u2009\u202f ]\d{3})+,\d+)
    | (?P<comma>\d+,\d+)
    """,
    re.VERBOSE,
)
_FRACTION = re.compile(r"(\d?)\\[dt]?frac\s?\{([^{}]*)\}\s?\{([^{}]*)\}")
_POWER_OF_TEN = re.compile(
    r"(?<=\d)\s?(?:[×x*·]|\\times|\\cdot)\s?10(?:\^\{?([-+\u2212]?\d+)\}?|(⁻?[⁰¹²³⁴-⁹]+))"
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻\u2212", "0123456789--")
_LONGEST = 400
"""Characters of a number that are looked at: a float has at most 309 digits before its point."""


def last_number(text: str) -> float | None:
    """The last number written in `text` (see the module's table), or None.

    One that no float holds (1e999) counts as none.
    """
    text = _FRACTION.sub(lambda m: f"{m[1]}{' ' * bool(m[1])}{m[2]}/{m[3]}", text)
    text = _POWER_OF_TEN.sub(lambda m: f"e{(m[1] or m[2]).translate(_RAISED)}", text)
    last = deque(_WRITTEN.finditer(text), maxlen=1)
    if not last:
        return None
    found = last[0]
    digits, before = _last_of(found["digits"])
    value = float(f"{digits}e{found['exponent'] or 0}")
    if found["denominator"]:
        lower, apart = _last_of(found["denominator"])
        below = float(lower)
        whole = re.fullmatch(r"(?:.*\D)?(\d+) ", before)
        if apart or not below:  # 2/3 4 ends in 4, and nothing is divided by 0
            value, before = below, "apart"
        elif whole and value < below:  # 1 1/2
            value = float(whole[1]) + value / below
            before = before[: whole.start(1)]
        else:
            value /= below
    value = -value if found["sign"] and not before else value
    return value if math.isfinite(value) else None


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the completion's last number equals the answer's, 0.0 where not.

    A row whose `answer` holds no number cannot be judged: None.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        wanted, found = last_number(str(expected)), last_number(completion)
        if wanted is None:
            rewards.append(None)
        else:
            right = found is not None and abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))
            rewards.append(float(right))
    return rewards


def _last_of(chain: str) -> tuple[str, str]:
    """The number that `chain` ends in, the longest there is, as Python writes it; and what stands
    before it."""
    first = max(0, len(chain) - _LONGEST)
    starts = [first, *(mark.end() for mark in re.compile(r"\D").finditer(chain, first))]
    numbers = (number for start in starts if (number := _NUMBER.fullmatch(chain, start)))
    # A mark that parts two numbers is not within the second: of 1,2,3 the last is 3, not 2,3.
    apart = (n for n in numbers if n.start() == first or chain[n.start() - 1] not in n[0])
    number = next(apart)  # the last run of digits is one
    text = number[0]
    if number["grouped"]:
        text = text.replace(number["mark"], "")
    elif number["dotted"] or number["comma"]:
        text = re.sub(r"[^\d,]", "", text).replace(",", ".")
    return text, chain[: number.start()]
