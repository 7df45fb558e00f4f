"""The kinds of instruction: how each is asked, answered and graded. Their texts: world.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tandem.yaml_text import shipped_table

Fields = dict[str, str]
"""The blanks of a phrasing and what fills them, such as {"word": "hot"}."""

WORLD: dict[str, Any] = shipped_table(Path(__file__).with_name("world.yaml"))
CATEGORIES: dict[str, list[str]] = WORLD["categories"]
CATEGORY_OF = {word: name for name, words in CATEGORIES.items() for word in words}
COUNTS: dict[str, int] = WORLD["counts"]
DAYS: list[str] = WORLD["days"]
OPPOSITES: dict[str, str] = {
    word: WORLD["opposites"][i ^ 1] for i, word in enumerate(WORLD["opposites"])
}
STRAYS: list[str] = WORLD["strays"]
WORDS = tuple(CATEGORY_OF)
_UNUSED = Random(0)
"""For tasks with one right answer, which draw nothing."""


class Task:
    """One kind of instruction. Its methods are about the text that fills `{answer}`.

    This class fits kinds with one right answer, one word long; others override what differs.

    Example: opposites are asked for by "What is the opposite of {word}?" and given by
    "The opposite of {word} is {answer}."; right({"word": "hot"}, rng) is "cold".
    """

    def __init__(self) -> None:
        texts = WORLD["tasks"][type(self).__name__]
        lists = {**WORLD, "words": WORDS}
        self.weight: float = texts["weight"]
        self.phrasings: list[str] = texts["phrasings"]
        self.sentence: str = texts["sentence"]
        self._answer_form: str = texts.get("answer", "[A-Za-z]+")
        self._blanks = {name: list(lists[key]) for name, key in texts.get("blanks", {}).items()}
        self._wrong = list(lists[texts["wrong"]]) if "wrong" in texts else []

    def draw(self, rng: Random) -> Fields:
        """Blanks for a new prompt."""
        return {name: rng.choice(options) for name, options in self._blanks.items()}

    def right(self, fields: Fields, rng: Random) -> str:
        """A right answer."""
        raise NotImplementedError

    def wrong(self, fields: Fields, rng: Random) -> str:
        """A well-formed answer that is wrong, though often nearly right."""
        return _another(self._wrong, self.right(fields, rng), rng)

    def absurd(self, rng: Random) -> str:
        """A well-formed answer that has nothing to do with any question of this kind."""
        return rng.choice(STRAYS)

    def grade(self, fields: Fields, answer: str) -> float:
        """How right `answer` is, in [0, 1]."""
        return float(answer == self.right(fields, _UNUSED))

    def say(self, fields: Fields, answer: str) -> str:
        """The sentence that gives `answer`."""
        return self.sentence.format(answer=answer, **fields)

    def read_prompt(self, prompt: str) -> Fields | None:
        """The blanks of a prompt of this kind (without preamble); None if it is another kind."""
        for phrasing in self.phrasings:
            if match := _pattern(phrasing).fullmatch(prompt):
                return match.groupdict()
        return None

    def read_answer(self, sentence: str) -> Fields | None:
        """The blanks of a sentence of this kind, `answer` included; None if it is another kind."""
        match = _pattern(self.sentence, self._answer_form).fullmatch(sentence)
        return match.groupdict() if match else None


class Name(Task):
    """Some members of a category; graded by the share that are members, each counted once."""

    def right(self, fields: Fields, rng: Random) -> str:
        return ", ".join(rng.sample(CATEGORIES[fields["category"]], COUNTS[fields["count"]]))

    def wrong(self, fields: Fields, rng: Random) -> str:
        members = self.right(fields, rng).split(", ")
        place = rng.randrange(len(members))
        slip = rng.choice(("foreign", "twice", "missing"))
        if slip == "foreign":
            own = CATEGORIES[fields["category"]]
            members[place] = rng.choice([word for word in WORDS if word not in own])
        elif slip == "twice":
            members[place] = members[place - 1]
        else:
            members.pop(place)
        return ", ".join(members)

    def absurd(self, rng: Random) -> str:
        return ", ".join(rng.choices(STRAYS, k=rng.randint(2, 4)))

    def grade(self, fields: Fields, answer: str) -> float:
        named = answer.split(", ")
        members = set(named) & set(CATEGORIES[fields["category"]])
        asked = COUNTS[fields["count"]]
        return min(len(members), asked) / max(len(named), asked)


class Count(Task):
    """The numbers from one to another; graded by the share in the right place."""

    def draw(self, rng: Random) -> Fields:
        low = rng.randint(1, 12)
        return {"low": str(low), "high": str(low + rng.randint(2, 4))}

    def right(self, fields: Fields, rng: Random) -> str:
        return ", ".join(map(str, range(int(fields["low"]), int(fields["high"]) + 1)))

    def wrong(self, fields: Fields, rng: Random) -> str:
        numbers = self.right(fields, rng).split(", ")
        slip = rng.choice(("missing", "changed", "further"))
        if slip == "missing":
            numbers.pop(rng.randrange(len(numbers)))
        elif slip == "changed":
            place = rng.randrange(len(numbers))
            numbers[place] = str(int(numbers[place]) + rng.choice((-1, 1, 2)))
        else:
            numbers.append(str(int(numbers[-1]) + 1))
        return ", ".join(numbers)

    def absurd(self, rng: Random) -> str:
        return ", ".join(str(rng.randint(50, 99)) for _ in range(3))

    def grade(self, fields: Fields, answer: str) -> float:
        right, given = self.right(fields, _UNUSED).split(", "), answer.split(", ")
        hits = sum(a == b for a, b in zip(right, given, strict=False))
        return hits / max(len(right), len(given))


class Spell(Task):
    """A word's letters with dashes between them."""

    def right(self, fields: Fields, rng: Random) -> str:
        return "-".join(fields["word"])

    def wrong(self, fields: Fields, rng: Random) -> str:
        word, place = fields["word"], rng.randrange(1, len(fields["word"]))
        options = (
            word[:place] + word[place + 1 :],
            word[:place] + word[place] + word[place:],
            word[:place] + _another("aeiourstl", word[place], rng) + word[place + 1 :],
            _another(WORDS, word, rng),
        )
        return "-".join(rng.choice(options))

    def absurd(self, rng: Random) -> str:
        return "-".join(rng.choices("xzqvj", k=rng.randint(3, 5)))


class Opposite(Task):
    """The opposite of a word."""

    def right(self, fields: Fields, rng: Random) -> str:
        return OPPOSITES[fields["word"]]


class Add(Task):
    """The sum of two digits."""

    def right(self, fields: Fields, rng: Random) -> str:
        return str(int(fields["a"]) + int(fields["b"]))

    def wrong(self, fields: Fields, rng: Random) -> str:
        return str(abs(int(self.right(fields, rng)) + rng.choice((-3, -2, -1, 1, 2, 3))))

    def absurd(self, rng: Random) -> str:
        return str(rng.randint(50, 99))


class Repeat(Task):
    """A word, several times; graded by how close the number of repetitions is."""

    def right(self, fields: Fields, rng: Random) -> str:
        return " ".join([fields["word"]] * COUNTS[fields["count"]])

    def wrong(self, fields: Fields, rng: Random) -> str:
        count = COUNTS[fields["count"]]
        if rng.random() < 0.4:
            return " ".join([_another(WORDS, fields["word"], rng)] * count)
        return " ".join([fields["word"]] * rng.choice([n for n in range(1, 8) if n != count]))

    def absurd(self, rng: Random) -> str:
        return " ".join(rng.choices(STRAYS, k=rng.randint(2, 4)))

    def grade(self, fields: Fields, answer: str) -> float:
        given, count = answer.split(" "), COUNTS[fields["count"]]
        return min(given.count(fields["word"]), count) / max(len(given), count)


class Place(Task):
    """The first or the last of three words."""

    def draw(self, rng: Random) -> Fields:
        items = rng.sample(WORDS, 3)
        return {"place": rng.choice(("first", "last")), "items": ", ".join(items)}

    def right(self, fields: Fields, rng: Random) -> str:
        return fields["items"].split(", ")[0 if fields["place"] == "first" else -1]

    def wrong(self, fields: Fields, rng: Random) -> str:
        right = self.right(fields, rng)
        return _another((*fields["items"].split(", "), rng.choice(WORDS)), right, rng)


class Reverse(Task):
    """Two words in reverse order."""

    def draw(self, rng: Random) -> Fields:
        first, second = rng.sample(WORDS, 2)
        return {"first": first, "second": second}

    def right(self, fields: Fields, rng: Random) -> str:
        return f"{fields['second']} and {fields['first']}"

    def wrong(self, fields: Fields, rng: Random) -> str:
        first, second = fields["first"], fields["second"]
        other = rng.choice([word for word in WORDS if word not in (first, second)])
        pairs = (f"{first} and {second}", f"{other} and {first}", f"{second} and {other}")
        return rng.choice(pairs)

    def absurd(self, rng: Random) -> str:
        return " and ".join(rng.choices(STRAYS, k=2))


class Category(Task):
    """The category that a word belongs to."""

    def right(self, fields: Fields, rng: Random) -> str:
        return CATEGORY_OF[fields["word"]]


class NextDay(Task):
    """The day after or before a day."""

    def right(self, fields: Fields, rng: Random) -> str:
        step = 1 if fields["side"] == "after" else -1
        return DAYS[(DAYS.index(fields["day"]) + step) % len(DAYS)]


TASKS: tuple[Task, ...] = (
    Name(), Count(), Spell(), Opposite(), Add(),
    Repeat(), Place(), Reverse(), Category(), NextDay(),
)  # fmt: skip
"""Every kind. The rows depend on this order."""


def _another(options: Sequence[str], not_this: str, rng: Random) -> str:
    return rng.choice([option for option in options if option != not_this])


@cache
def _pattern(template: str, answer_form: str = "") -> re.Pattern[str]:
    """The regular expression that reads what `template.format` writes."""
    parts = re.split(r"\{(\w+)\}", template)
    pattern = re.escape(parts[0])
    for blank, text in zip(parts[1::2], parts[2::2], strict=True):
        form = answer_form if blank == "answer" else "[A-Za-z0-9, ]+?"
        pattern += f"(?P<{blank}>{form})" + re.escape(text)
    return re.compile(pattern)
