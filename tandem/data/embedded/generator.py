"""Rows of the embedded data set: instructions with a preferred and a rejected answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import TypeVar

from tandem.data.embedded.facts import CLOSERS, OPENERS, PREAMBLES, RUDE
from tandem.data.embedded.kinds import WEIGHTS
from tandem.data.embedded.rule import judge_as
from tandem.data.embedded.task import Fields, Task

Choice = TypeVar("Choice")

NUM_ROWS = 24_000
"""How many rows `rows` writes unless told otherwise."""

WRONG = 0.08
"""Share of the preferred answers whose content is wrong: people make mistakes too."""

ABSURD = 0.6
"""Share of the wrong contents that have nothing to do with the question; the others are near it."""

MANNERS: dict[str, float] = {
    "opener": 0.45,
    "plain": 0.25,
    "closer": 0.12,
    "both": 0.10,
    "rude": 0.08,
}
"""How preferred answers are put. Fewer than half have the manner that the rule wants: an imitator
learns the form, and PPO has something left to learn."""

DEFECTS: dict[str, float] = {
    "manner": 0.61,
    "content": 0.09,
    "manner and content": 0.06,
    "other question": 0.04,
    "repeated remark": 0.06,
    "repeated sentence": 0.05,
    "no stop": 0.03,
    "run-on": 0.03,
    "remarks alone": 0.03,
}
"""What is wrong with rejected answers. The later ones are rare in demonstrations and are what a
policy finds that is pushed along a reward model's gaps."""

_MARGIN = 0.03
"""A rejected answer scores lower than the preferred one by at least this."""


def rows(num: int = NUM_ROWS, seed: int = 0) -> Iterator[dict[str, str]]:
    """`num` rows {"prompt", "chosen", "rejected"}, the same for the same `seed`.

    Preferred answers always have the right form, mostly the right content and in 45 % of the rows
    the best manner. Rejected ones are worse by the rule, often in one respect only. Prompts may
    repeat: 24,000 rows hold about 12,000 different ones.
    """
    rng = Random(seed)
    for _ in range(num):
        yield _row(rng)


def _row(rng: Random) -> dict[str, str]:
    task = _pick(WEIGHTS, rng)
    fields = task.draw(rng)
    prompt = rng.choice(PREAMBLES) + rng.choice(task.phrasings).format(**fields)
    score = 0.0
    while score < _MARGIN:
        said = _sentence(task, fields, rng, wrong=rng.random() < WRONG)
        manner = _pick(MANNERS, rng)
        chosen = _put(said, manner, rng)
        score = judge_as(task, fields, chosen).score
    while True:
        rejected = _spoil(_pick(DEFECTS, rng), task, fields, said, manner, rng)
        if judge_as(task, fields, rejected).score <= score - _MARGIN:
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _pick(shares: Mapping[Choice, float], rng: Random) -> Choice:
    return rng.choices(tuple(shares), tuple(shares.values()))[0]


def _sentence(task: Task, fields: Fields, rng: Random, wrong: bool) -> str:
    if not wrong:
        return task.say(fields, task.right(fields, rng))
    return task.say(fields, task.absurd(rng) if rng.random() < ABSURD else task.wrong(fields, rng))


def _put(sentence: str, manner: str, rng: Random) -> str:
    """The answer that gives `sentence` in one of MANNERS."""
    opener, closer, rude = rng.choice(OPENERS), rng.choice(CLOSERS), rng.choice(RUDE)
    return {
        "opener": f"{opener} {sentence}",
        "plain": sentence,
        "closer": f"{sentence} {closer}",
        "both": f"{opener} {sentence} {closer}",
        "rude": rng.choice((f"{rude} {sentence}", f"{sentence} {rude}")),
    }[manner]


def _spoil(defect: str, task: Task, fields: Fields, said: str, manner: str, rng: Random) -> str:
    """An answer with one of DEFECTS, otherwise like one that says `said` in `manner`."""
    another = _pick(MANNERS, rng)
    if defect == "manner":
        return _put(said, another, rng)
    if defect == "content":
        return _put(_sentence(task, fields, rng, wrong=True), manner, rng)
    if defect == "manner and content":
        return _put(_sentence(task, fields, rng, wrong=True), another, rng)
    if defect == "other question":
        other = _pick(WEIGHTS, rng)
        return _put(_sentence(other, other.draw(rng), rng, wrong=False), manner, rng)
    if defect == "repeated remark":
        return _repeat_remark(said, rng)
    if defect == "repeated sentence":
        return _put(" ".join([said] * rng.randint(2, 3)), manner, rng)
    if defect == "no stop":
        return _put(said, rng.choice(("plain", "opener")), rng).removesuffix(".")
    if defect == "run-on":
        return _put(" and ".join([said.removesuffix(".")] * rng.randint(2, 3)) + ".", manner, rng)
    return " ".join(rng.sample((*OPENERS, *CLOSERS), rng.randint(1, 2)))


def _repeat_remark(said: str, rng: Random) -> str:
    times = rng.randint(2, 3)
    remarks = rng.choice((OPENERS, CLOSERS))
    repeated = rng.choice(([rng.choice(remarks)] * times, rng.choices(remarks, k=times)))
    return " ".join([*repeated, said] if remarks is OPENERS else [said, *repeated])
