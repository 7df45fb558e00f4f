"""Rows of the embedded data set: instructions with a preferred and a rejected answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate
from random import Random

from tandem.data.embedded.rule import CLOSERS, OPENERS, PREAMBLES, RUDE, judge_as
from tandem.data.embedded.tasks import TASKS, WORLD, Fields, Task

NUM_ROWS = 24_000
"""Rows in the data set."""
WRONG = 0.08
"""Share of the preferred answers whose content is wrong: people make mistakes too."""
ABSURD = 0.6
"""Share of the wrong contents that have nothing to do with the question; the others are close."""
_TASK_SUMS = tuple(accumulate(task.weight for task in TASKS))
_MARGIN = 0.03
"""A rejected answer scores at least this much lower than the preferred one."""


def rows(num: int = NUM_ROWS, seed: int = 0) -> Iterator[dict[str, str]]:
    """`num` rows {"prompt", "chosen", "rejected"}, the same for the same `seed`.

    Preferred answers always have the right form, mostly the right content and in 45 % of the rows
    the best manner. Rejected ones are worse by the rule, often in one respect only. Prompts may
    repeat: 24,000 rows hold about 12,000 different ones. What was made once in this process is
    kept: the demo reads the rows for its tokenizer, then for its data.
    """
    made, rng = _begun(seed)
    for number in range(num):
        if number == len(made):
            made.append(_row(rng))
        yield dict(made[number])


@cache
def _begun(seed: int) -> tuple[list[dict[str, str]], Random]:
    """The rows of a seed that were made, and what draws the next."""
    return [], Random(seed)


def _row(rng: Random) -> dict[str, str]:
    task = _pick_task(rng)
    fields = task.draw(rng)
    prompt = rng.choice(PREAMBLES) + rng.choice(task.phrasings).format(**fields)
    score = 0.0
    while score < _MARGIN:
        sentence = _sentence(task, fields, rng, wrong=rng.random() < WRONG)
        manner = _pick("manners", rng)
        chosen = _with_remarks(sentence, manner, rng)
        score = judge_as(task, fields, chosen).score
    while True:
        defect = _pick("defects", rng)
        rejected = _spoil(defect, task, fields, sentence, manner, rng)
        if judge_as(task, fields, rejected).score <= score - _MARGIN:
            return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _pick(name: str, rng: Random) -> str:
    """One of the world's `manners` or `defects`, by their shares."""
    names, sums = _shares(name)
    return rng.choices(names, cum_weights=sums)[0]


@cache
def _shares(name: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """What can be picked, and the sums of the shares so far."""
    shares: Mapping[str, float] = WORLD[name]
    return tuple(shares), tuple(accumulate(shares.values()))


def _pick_task(rng: Random) -> Task:
    return rng.choices(TASKS, cum_weights=_TASK_SUMS)[0]


def _sentence(task: Task, fields: Fields, rng: Random, wrong: bool) -> str:
    if not wrong:
        return task.say(fields, task.right(fields, rng))
    return task.say(fields, task.absurd(rng) if rng.random() < ABSURD else task.wrong(fields, rng))


def _with_remarks(sentence: str, manner: str, rng: Random) -> str:
    """The answer that gives `sentence` in one of the manners."""
    opener, closer, rude = rng.choice(OPENERS), rng.choice(CLOSERS), rng.choice(RUDE)
    return {
        "opener": f"{opener} {sentence}",
        "plain": sentence,
        "closer": f"{sentence} {closer}",
        "both": f"{opener} {sentence} {closer}",
        "rude": rng.choice((f"{rude} {sentence}", f"{sentence} {rude}")),
    }[manner]


def _spoil(defect: str, task: Task, fields: Fields, sentence: str, manner: str, rng: Random) -> str:
    """An answer with one of the defects, otherwise like one that gives `sentence` in `manner`."""
    another = _pick("manners", rng)
    stem = sentence.removesuffix(".")
    match defect:
        case "manner":
            return _with_remarks(sentence, another, rng)
        case "content":
            return _with_remarks(_sentence(task, fields, rng, wrong=True), manner, rng)
        case "manner and content":
            return _with_remarks(_sentence(task, fields, rng, wrong=True), another, rng)
        case "other question":
            other = _pick_task(rng)
            return _with_remarks(_sentence(other, other.draw(rng), rng, wrong=False), manner, rng)
        case "repeated remark":
            return _repeat_remark(sentence, rng)
        case "repeated sentence":
            return _with_remarks(" ".join([sentence] * rng.randint(2, 3)), manner, rng)
        case "no stop":
            return _with_remarks(sentence, rng.choice(("plain", "opener")), rng).removesuffix(".")
        case "run-on":
            return _with_remarks(" and ".join([stem] * rng.randint(2, 3)) + ".", manner, rng)
    return " ".join(rng.sample((*OPENERS, *CLOSERS), rng.randint(1, 2)))


def _repeat_remark(sentence: str, rng: Random) -> str:
    times = rng.randint(2, 3)
    remarks = rng.choice((OPENERS, CLOSERS))
    repeated = rng.choice(([rng.choice(remarks)] * times, rng.choices(remarks, k=times)))
    return " ".join([*repeated, sentence] if remarks is OPENERS else [sentence, *repeated])
