"""Conversations within a rollout, against a loop with Hugging Face's whole forward per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.generation.conversing import ConversationRow
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.ops import native
from tandem.types import Message, PromptRow, Rollout, Source

LIMIT, MOST, LONGEST = 12, 4, 64
STOPS = Stops(tuple(range(0, 96, 5)), 0, lambda ids: " ".join(map(str, ids)))
PROMPTS = [
    PromptRow(
        tuple((3 * i + 5 * j) % 96 for j in range(4 + 9 * i)),
        (Message("user", f"prompt {i}"),),
        {},
        Source("made", "made", i),
    )
    for i in range(6)
]


def heard(place: int, num_answers: int) -> tuple[int, ...]:
    """What a conversation's answer hears: ids that differ from turn to turn."""
    return tuple((11 * place + 13 * num_answers + j) % 96 for j in range(3 + place % 4))


@dataclass
class Says:
    """An environment that ends every third conversation after its second answer; `slow` of its
    looks pass until it has answered."""

    max_answers: int = MOST
    longest: int = LONGEST
    slow: int = 0
    waiting: list[tuple[int, int, ConversationRow]] = field(default_factory=list)
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    looks: int = 0

    def answered(
        self, place: int, row: ConversationRow, token_ids: Sequence[int], text: str
    ) -> None:
        assert token_ids[-1] in STOPS.stop_token_ids
        self.texts[place, row.num_answers] = text
        turns = (*row.messages, Message("assistant", text), Message("user", "more"))
        ids = (*row.token_ids, *token_ids, *heard(place, row.num_answers))
        self.waiting.append((self.looks + self.slow * (1 + place % 2), place, self.next(
            place, row, replace(row, token_ids=ids, messages=turns))))  # fmt: skip

    def next(self, place: int, row: ConversationRow, longer: ConversationRow) -> ConversationRow:
        if place % 3 == 0 and row.num_answers == 2:
            return replace(row, end="over")
        return longer if len(longer) <= self.longest else replace(row, end="tokens")

    def going_on(self, *, wait: bool) -> Sequence[tuple[int, ConversationRow]]:
        self.looks += 1
        if wait and self.waiting:
            self.looks = max(self.looks, min(due for due, _, _ in self.waiting))
        ready = [(place, row) for due, place, row in self.waiting if due <= self.looks]
        self.waiting = [item for item in self.waiting if item[0] > self.looks]
        return ready


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,  # so that its likeliest tokens differ from place to place
    )
    return LlamaForCausalLM(config).eval()


def drawn(model: LlamaForCausalLM, says: Says | None = None, **how: object) -> Rollout:
    sampling = SamplingConfig(max_new_tokens=LIMIT, samples_per_prompt=3)
    says = says or Says()
    return generate(model, PROMPTS, sampling, STOPS, seed=7, step=2, conversing=says, **how)  # type: ignore[arg-type]


def slowly(model: LlamaForCausalLM, prompt: PromptRow, place: int) -> tuple[list[int], list[bool]]:
    """The ids of one conversation and which the policy chose, by its likeliest tokens."""
    ids, mine, num_answers = list(prompt.token_ids), [False] * len(prompt), 0
    while True:
        num_answers += 1
        for _ in range(LIMIT):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            mine.append(True)
            if ids[-1] in STOPS.stop_token_ids:
                break
        else:
            return ids, mine
        if num_answers == MOST or (place % 3 == 0 and num_answers == 2):
            return ids, mine
        says = heard(place, num_answers)
        if len(ids) + len(says) > LONGEST:
            return ids, mine
        ids += says
        mine += [False] * len(says)


def test_the_likeliest_tokens_are_those_of_a_slow_loop(model: LlamaForCausalLM) -> None:
    sampling = SamplingConfig(max_new_tokens=LIMIT, top_k=1)
    made = generate(model, PROMPTS, sampling, STOPS, conversing=Says())
    turns = []
    for place, prompt in enumerate(PROMPTS):
        ids, mine = slowly(model, prompt, place)
        real = made.batch.attention_mask[place]
        assert made.batch.token_ids[place][real].tolist() == ids, place
        assert made.batch.response_mask[place][real].tolist() == mine, place
        row = made.prompts[place]
        assert isinstance(row, ConversationRow)
        turns.append(row.num_answers)
        assert tuple(ids[: len(row)]) == row.token_ids
        assert made.responses[place].split() == [
            str(i) for i in ids[len(row) :] if i not in STOPS.stop_token_ids
        ]
    assert max(turns) > 2


def test_logprobs_are_those_of_the_whole_conversation(model: LlamaForCausalLM) -> None:
    made = drawn(model)
    for row in range(len(made)):
        real = made.batch.attention_mask[row]
        ids, mine = made.batch.token_ids[row][real], made.batch.response_mask[row][real]
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        found = made.rollout_logprobs[row][real]
        torch.testing.assert_close(found[1:][mine[1:]], expected[mine[1:]], atol=1e-5, rtol=1e-5)
        assert not bool(found[~mine].any())


def test_conversations_end_where_they_must(model: LlamaForCausalLM) -> None:
    made = drawn(model)
    ends = {}
    for place, row in enumerate(made.prompts):
        assert isinstance(row, ConversationRow)
        ends[place] = row.end
        ids = made.batch.token_ids[place][made.batch.attention_mask[place]].tolist()
        closed = ids[-1] in STOPS.stop_token_ids
        assert bool(made.finished[place]) == closed
        if row.end == "over":
            assert (row.num_answers, place % 3) == (2, 0)
        elif row.end == "turns":
            assert row.num_answers == MOST
        elif row.end == "tokens":
            assert len(ids) + len(heard(place, row.num_answers)) > LONGEST
        else:
            assert row.end == "length"
            assert not closed
        assert len(row) <= LONGEST
    assert set(ends.values()) == {"over", "turns", "tokens", "length"}
    assert made.group.tolist() == [i // 3 for i in range(18)]
    assert [row.source.line for row in made.prompts] == [i // 3 for i in range(18)]


@pytest.mark.parametrize(
    "how", [{"batch_size": 2}, {"kv_blocks": 9}, {"share_prompts": False}, {"chunk_tokens": 16}]
)
@pytest.mark.skipif(not native.available(), reason="bits are promised of the C++ operations")
def test_no_bit_depends_on_what_runs_beside_it(
    model: LlamaForCausalLM, how: dict[str, object]
) -> None:
    expected, found = drawn(model), drawn(model, Says(slow=5), **how)
    assert torch.equal(found.batch.token_ids, expected.batch.token_ids)
    for name in ("rollout_logprobs", "sampled_logprobs", "rollout_entropy"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.prompts == expected.prompts
    assert found.responses == expected.responses


def test_each_answer_is_heard_as_text_and_has_randomness_of_its_own(
    model: LlamaForCausalLM,
) -> None:
    says = Says()
    made = drawn(model, says)
    for place, row in enumerate(made.prompts):
        assert isinstance(row, ConversationRow)
        said = [turn.content for turn in row.messages if turn.role == "assistant"]
        assert said == [says.texts[place, n] for n in range(1, row.num_answers)]
    # Were the draws of a first and a second answer keyed alike, they would often begin alike.
    firsts = [says.texts[place, 1].split()[:1] for place in range(18) if (place, 2) in says.texts]
    seconds = [says.texts[place, 2].split()[:1] for place in range(18) if (place, 2) in says.texts]
    assert sum(a == b for a, b in zip(firsts, seconds, strict=True)) < len(firsts) / 3


def test_hugging_faces_generate_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(GenerationError, match="Tandem's own decoder"):
        drawn(model, by_hugging_face=True)
