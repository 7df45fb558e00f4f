"""What a kind of instruction is: how it is asked, answered and graded."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from functools import cache
from random import Random
from typing import ClassVar

Fields = dict[str, str]
"""The blanks of a phrasing and what fills them, such as {"word": "hot"}."""

STRAYS = ("moon", "door", "seven", "river", "sleep")
"""Words that are part of no right answer."""

NUMBER = r"\d+"
WORD = r"[A-Za-z]+"


class Task(ABC):
    """One kind of instruction. Its methods speak of the text that fills `{answer}`.

    phrasings: ways to ask, with blanks. sentence: the one form of the answer, with the same
    blanks or some of them, and `{answer}`. answer_form: regular expression of a well-formed
    `{answer}`.

    Example: opposites are asked for by "What is the opposite of {word}?" and given by
    "The opposite of {word} is {answer}."; right({"word": "hot"}, rng) is "cold".
    """

    phrasings: ClassVar[tuple[str, ...]]
    sentence: ClassVar[str]
    answer_form: ClassVar[str] = WORD

    @abstractmethod
    def draw(self, rng: Random) -> Fields:
        """Blanks for a new prompt."""

    @abstractmethod
    def right(self, fields: Fields, rng: Random) -> str:
        """A right answer."""

    @abstractmethod
    def wrong(self, fields: Fields, rng: Random) -> str:
        """A well-formed answer that is wrong, though often nearly right."""

    def absurd(self, rng: Random) -> str:
        """A well-formed answer that has nothing to do with any question of this kind."""
        return rng.choice(STRAYS)

    def grade(self, fields: Fields, answer: str) -> float:
        """How right `answer` is, in [0, 1]; here: 1 for the only right one."""
        return float(answer == self.right(fields, Random(0)))

    def say(self, fields: Fields, answer: str) -> str:
        """The sentence that gives `answer`."""
        return self.sentence.format(answer=answer, **fields)

    def read_prompt(self, prompt: str) -> Fields | None:
        """The blanks of a prompt of this kind (without preamble); None if it is of another."""
        for phrasing in self.phrasings:
            if match := _pattern(phrasing).fullmatch(prompt):
                return match.groupdict()
        return None

    def read_answer(self, sentence: str) -> Fields | None:
        """The blanks of a sentence of this kind, `answer` included; None if it is of another."""
        match = _pattern(self.sentence, self.answer_form).fullmatch(sentence)
        return match.groupdict() if match else None


@cache
def _pattern(template: str, answer_form: str = "") -> re.Pattern[str]:
    """The regular expression that reads what `template.format` writes."""
    parts = re.split(r"\{(\w+)\}", template)
    pattern = re.escape(parts[0])
    for blank, text in zip(parts[1::2], parts[2::2], strict=True):
        form = answer_form if blank == "answer" else "[A-Za-z0-9, ]+?"
        pattern += f"(?P<{blank}>{form})" + re.escape(text)
    return re.compile(pattern)
