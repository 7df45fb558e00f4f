"""Answers with a form whose tokens are guessed and run ahead: the same, in fewer steps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from tandem.config.answer_form import AnswerForm
from tandem.config.schema import SamplingConfig
from tandem.data.render import Renderer
from tandem.generation import speculative
from tandem.generation.constrained import Constraint, constrainer_of
from tandem.generation.speculative import StepTimes
from tandem.generation.stops import Stops
from tandem.generation.streaming import Conversations, Handle
from tests.data.built_tokenizers import CHATML, byte_level
from tests.generation.rollouts import bitwise
from tests.tiny import tiny_llama

pytest.importorskip("llguidance")

ITEMS = {
    "type": "array",
    "minItems": 2,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["hello", "there"]}, "age": {"enum": [1, 22]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
FREE = SamplingConfig(max_new_tokens=50, temperature=0.7)
FORMS = {
    "json": replace(FREE, json_schema=json.dumps(ITEMS), max_new_tokens=100),
    "json cut off": replace(FREE, json_schema=json.dumps(ITEMS), max_new_tokens=17),
    "regex": replace(FREE, regex="(yes|no|maybe so), (hello there|how are you)"),
    "circles": replace(FREE, regex="(ab|cd)+", temperature=0.05),
}


@pytest.fixture(autouse=True)
def _small_models_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "LEAST_BYTES", 0)


@cache
def renderer() -> Renderer:
    return Renderer(byte_level(CHATML))


@cache
def model() -> PreTrainedModel:
    return tiny_llama(len(renderer().pieces.tokenizer))


def answers(*samplings: SamplingConfig, **how: Any) -> tuple[list[Handle], int]:
    prompt, steps = renderer().prompt("hello there").token_ids, 0
    with Conversations(model(), Stops.of(renderer()), slots=4, max_tokens=160, **how) as talk:
        handles = [
            talk.submit_samples(prompt, sampling, seed=i, top_logprobs=1)[0]
            for i, sampling in enumerate(samplings)
        ]
        while talk.busy:
            talk.step()
            steps += 1
    return handles, steps


@bitwise
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beside", [(), (FREE, replace(FREE, regex="[a-f]{30}"))])
def test_drafts_change_no_answer_of_a_form(
    form: str, beside: Sequence[SamplingConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimes, "of", lambda self, rows: 1.0)
    monkeypatch.setattr(StepTimes, "reach", 32)
    monkeypatch.setattr(StepTimes, "look", 0.0)
    plain, steps = answers(FORMS[form], *beside, speculate=False)
    ahead, fewer = answers(FORMS[form], *beside)
    for a, b in zip(plain, ahead, strict=True):
        assert a.error is None
        assert (a.token_ids, a.stop_token, a.finished) == (b.token_ids, b.stop_token, b.finished)
        assert a.logprobs == b.logprobs
    assert fewer < steps or (beside and fewer == steps)  # the longest may be one that is free
    if not beside and form == "json":
        assert fewer < 0.6 * steps  # keys and punctuation are forced
        json.loads(renderer().decode(ahead[0].token_ids))


def tokens_of(bits: np.ndarray | None) -> set[int] | None:
    if bits is None:
        return None
    return {32 * i + j for i, word in enumerate(bits) for j in range(32) if int(word) >> j & 1}


def bits_of(constraint: Constraint) -> set[int] | None:
    return tokens_of(constraint.bits())


def slow_forced(constraint: Constraint, most: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(most):
        further = constraint.copy()
        further.take_all(tokens)
        allowed = bits_of(further)
        if allowed is None or len(allowed) != 1:
            break
        tokens += allowed
    return tokens


def slow_ahead(constraint: Constraint, draft: Sequence[int]) -> list[set[int] | None]:
    found = [bits_of(constraint)]
    for i in range(len(draft)):
        further = constraint.copy()
        for token in draft[: i + 1]:
            further.take(token)
        if found[-1] is None or draft[i] not in found[-1] or bits_of(further) == set():
            break
        found.append(bits_of(further))
    return found


def test_what_is_forced_and_what_may_follow_is_found_token_by_token() -> None:
    prompt = renderer().prompt("hello there").token_ids
    chance = random.Random(3)
    lengths = set()
    for _ in range(6):
        form = AnswerForm.of_json(ITEMS)
        constraint = constrainer_of(renderer()).answer(form, prompt)
        for _ in range(120):
            allowed = bits_of(constraint)
            if allowed is None:
                break
            forced = constraint.forced(4)
            assert forced == slow_forced(constraint, 4)
            lengths.add(len(forced))
            draft = [*forced, chance.randrange(200), *forced][: chance.randrange(6)]
            sets = [tokens_of(bits) for bits in constraint.ahead(draft)]
            assert sets == slow_ahead(constraint, draft)
            constraint.take(chance.choice(sorted(allowed)))
    assert {0, 1, 4} <= lengths


def test_a_draft_ends_before_a_token_that_the_tokenizer_lacks() -> None:
    """A model may have more tokens, and prompts of ids may name them."""
    prompt = renderer().prompt("hello there").token_ids
    constraint = constrainer_of(renderer()).answer(AnswerForm("regex", "[a-c]{30}"), prompt)
    known = constraint.bits()
    assert known is not None
    for beyond in (len(renderer().pieces.tokenizer), 32 * len(known), 32 * len(known) + 40):
        assert len(constraint.ahead([beyond])) == 1
