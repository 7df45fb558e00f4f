"""Sampled answers to rows of a file: all of them, the best, or best against worst. No torch.

Every row's `prompt` is its turns, and `source` the file and line that it is from. `data.shapes`
reads `all` as a prompt, `best` as an answer to learn, `pairs` as a preference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tandem.message import Message, answer_text

WRITES = ("all", "best", "pairs")
CUT_OFF = "answers cut off by the length limit"
BLANK = "blank answers"
EQUAL = "equal rewards"


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One answer: its text, its reward (None: nothing scored it), whether it ended by itself, and
    how many tokens were sampled. heard: of a conversation, the turns before its last answer that
    are not the prompt's. turn: it as a turn, with the calls of tools in it; None: its text."""

    text: str
    reward: float | None
    finished: bool
    tokens: int
    heard: tuple[Message, ...] = ()
    turn: Message | None = None

    @property
    def is_blank(self) -> bool:
        """Whether it, or an answer before it, says nothing: no row of data may have such a turn."""
        said = [answer_text(turn) for turn in self.heard if turn.role == "assistant"]
        return not all(text.strip() for text in (*said, self.text))


@dataclass(frozen=True, slots=True)
class Choice:
    """What is written of a prompt's answers.

    write: one of WRITES. min_margin: of a pair's rewards. min_reward: of the best answer's reward;
    None: any. keep_cut_off: whether an answer that the length limit cut off may be chosen.
    """

    write: str
    min_margin: float = 0.0
    min_reward: float | None = None
    keep_cut_off: bool = False

    def candidates(self, answers: Sequence[SampledAnswer]) -> list[SampledAnswer]:
        """The answers that may be chosen: scored, not blank, and finished unless cut-off ones are
        kept. SFT would learn a cut-off one with a stop token behind it."""
        return [
            answer
            for answer in answers
            if answer.reward is not None
            and not answer.is_blank
            and (answer.finished or self.keep_cut_off)
        ]


def row_of(
    prompt: Sequence[Message],
    place: str,
    answers: Sequence[SampledAnswer],
    choice: Choice,
    tools: str = "",
) -> tuple[dict[str, Any] | None, str]:
    """A prompt's row, with its tools if it has some; or None and why there is none.

    Ties go to the answer that was sampled first.
    """
    head: dict[str, Any] = {"prompt": [_turn(message) for message in prompt]}
    if tools:
        head["tools"] = json.loads(tools)
    if choice.write == "all":
        listed = [
            {"text": a.text, "reward": a.reward, "finished": a.finished, "tokens": a.tokens}
            | ({"turns": _said(a)} if a.heard else {})
            for a in answers
        ]
        return {**head, "answers": listed, "source": place}, ""
    chosen = choice.candidates(answers)
    if reason := _too_few(answers, chosen, choice):
        return None, reason
    rewards = [answer.reward or 0.0 for answer in chosen]
    high, low = max(rewards), min(rewards)
    best, worst = chosen[rewards.index(high)], chosen[rewards.index(low)]
    if choice.min_reward is not None and high < choice.min_reward:
        return None, f"best reward below {choice.min_reward:g}"
    tail = {"n": len(answers), "source": place}
    if choice.write == "best":
        return {**head, "completion": _said(best), "reward": high, **tail}, ""
    if high == low:
        return None, EQUAL
    if _apart(high, low) < Decimal(str(choice.min_margin)):
        return None, f"rewards less than {choice.min_margin:g} apart"
    if best.text.strip() == worst.text.strip():
        return None, "the same text as best and worst"
    sides = {"chosen": _said(best), "rejected": _said(worst)}
    return {**head, **sides, "chosen_reward": high, "rejected_reward": low, **tail}, ""


def _too_few(
    answers: Sequence[SampledAnswer], chosen: Sequence[SampledAnswer], choice: Choice
) -> str:
    """Why there is nothing to choose from; "" if there is."""
    needed = 2 if choice.write == "pairs" else 1
    if len(chosen) >= needed:
        return ""
    scored = [answer for answer in answers if answer.reward is not None]
    if len(scored) < needed:
        return "no answer with a reward" if not scored else "one answer with a reward alone"
    written = [answer for answer in scored if not answer.is_blank]
    if len(written) < needed:
        return BLANK
    return CUT_OFF


def _apart(high: float, low: float) -> Decimal:
    """The difference of two rewards as they are written: 0.3 and 0.2 are 0.1 apart."""
    return Decimal(str(high)) - Decimal(str(low))


def _turn(message: Message) -> dict[str, Any]:
    turn = message.as_dict()
    if not message.learned:  # as the data had it
        turn["train"] = False
    return turn


def _said(answer: SampledAnswer) -> list[dict[str, Any]]:
    """The turns since the prompt."""
    last = answer.turn or Message("assistant", answer.text)
    return [turn.as_dict() for turn in (*answer.heard, last)]
