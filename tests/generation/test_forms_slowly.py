"""Answers with a form against a loop that runs the whole model per token and finds the allowed
tokens by trying each on a list of all words that have the form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.config.engine import engine_settings
from tandem.config.schema import ParallelConfig, RunConfig, SamplingConfig
from tandem.data.render import Renderer
from tandem.engine.forward import generation_weights
from tandem.engine.placement import prepare_for_training, shard_model
from tandem.engine.rollouts import shared_rollout
from tandem.engine.shard_plan import shard_plan
from tandem.generation.conversing import ConversationRow
from tandem.generation.generator import generate
from tandem.generation.sampler import Sampler, sequence_key
from tandem.generation.stops import Stops
from tandem.generation.streaming import Conversations
from tandem.parallel.tensor import tensor_group
from tandem.parallel.world import World
from tandem.serve.token_bytes import TokenBytes
from tandem.types import Message, PromptRow, Rollout
from tests.data.built_tokenizers import CHATML, byte_level
from tests.ranks import on_ranks
from tests.tiny import tiny_llama

pytest.importorskip("llguidance")

FORM = SamplingConfig(regex="[ab]{1,4}", max_new_tokens=12, samples_per_prompt=3)
WORDS = ["".join(letters) for n in range(1, 5) for letters in product("ab", repeat=n)]
SEED, STEP = 7, 2


@cache
def renderer() -> Renderer:
    return Renderer(byte_level(CHATML))


@cache
def model() -> PreTrainedModel:
    return tiny_llama(len(renderer().pieces.tokenizer))


@cache
def rows() -> list[PromptRow]:
    return [renderer().prompt(text) for text in ("hello there", "how are you?", "yes")]


@cache
def plain_tokens() -> dict[int, bytes]:
    tokenizer = renderer().pieces.tokenizer
    plain = {i: TokenBytes(tokenizer).of(i) for i in range(len(tokenizer))}
    for i in renderer().pieces.control.ids.values():
        del plain[i]
    return plain


@cache
def allowed_behind(written: bytes) -> torch.Tensor:
    """(V,) bool."""
    texts = [(word + trail).encode() for word in WORDS for trail in {"", renderer().trail}]
    found = torch.zeros(len(renderer().pieces.tokenizer), dtype=torch.bool)
    for i, raw in plain_tokens().items():
        found[i] = any(text.startswith(written + raw) for text in texts)
    if written in texts:
        found[list(renderer().stop_token_ids)] = True
    return found


@torch.no_grad()
def slowly(
    prompt: Sequence[int], sampling: SamplingConfig, *names: int, step: int = STEP
) -> list[int]:
    """One answer's tokens; `names` key its randomness beside seed and step."""
    stops = Stops.of(renderer())
    size = len(renderer().pieces.tokenizer)
    sampler = Sampler(sampling, stops.stop_token_ids, torch.device("cpu"), size)
    key, answer, written = sequence_key(SEED, step, *names), list[int](), b""
    while len(answer) < sampling.max_new_tokens:
        logits = model()(input_ids=torch.tensor([[*prompt, *answer]])).logits[:, -1].float()
        drawn = sampler.draw(
            logits, torch.tensor([key]), torch.tensor([len(answer)]), None,
            allowed_behind(written)[None],
        )  # fmt: skip
        answer.append(int(drawn.tokens))
        if answer[-1] in stops.stop_token_ids:
            break
        written += plain_tokens()[answer[-1]]
        ended = any(stop in written.decode() for stop in sampling.stop_strings)
        if ended and len(answer) >= sampling.min_new_tokens:
            break
    return answer


def answers_in(made: Rollout) -> list[list[int]]:
    batch = made.batch
    return [
        ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.response_mask, strict=True)
    ]


def expected(sampling: SamplingConfig) -> list[list[int]]:
    samples = sampling.samples_per_prompt
    return [
        slowly(row.token_ids, sampling, place, sample)
        for place, row in enumerate(rows())
        for sample in range(samples)
    ]


A = next(i for i in range(300) if plain_tokens().get(i) == b"a")


@pytest.mark.parametrize(
    "knobs",
    [{}, {"temperature": 0.4}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}, {"min_new_tokens": 3},
     {"min_new_tokens": 9}, {"logit_bias": (f"{A}:1",)}, {"logit_bias": (f"{A}:-inf",)},
     {"stop_strings": ("b",)}, {"stop_strings": ("ab",), "min_new_tokens": 2},
     {"samples_per_prompt": 1}, {"max_new_tokens": 2}],
    ids=str,
)  # fmt: skip
def test_every_knob_draws_what_a_slow_loop_draws(knobs: dict[str, Any]) -> None:
    sampling = replace(FORM, **knobs)
    found = expected(sampling)
    assert len({tuple(answer) for answer in found}) > 2
    ways: list[dict[str, Any]] = [
        {}, {"share_prompts": False}, {"batch_size": 2, "refill": 1}, {"chunk_tokens": 8},
        {"kv_blocks": 8}, {"by_hugging_face": True},
    ]  # fmt: skip
    for how in ways:
        made = generate(
            model(), rows(), sampling, Stops.of(renderer()), seed=SEED, step=STEP, **how
        )
        assert answers_in(made) == found, how


@dataclass
class Asks:
    """An environment that asks again after each answer, up to three."""

    longest: int = 160
    max_answers: int = 3
    waiting: list[tuple[int, ConversationRow]] = field(default_factory=list)
    prompts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def answered(
        self, place: int, row: ConversationRow, token_ids: Sequence[int], text: str
    ) -> None:
        turns = (*row.messages, Message("assistant", text), Message("user", "again"))
        longer = replace(row, token_ids=renderer().prompt(turns).token_ids, messages=turns)
        ids = (*row.token_ids, *token_ids, *longer.token_ids[-9:])
        self.prompts[place, row.num_answers] = ids
        self.waiting.append((place, replace(longer, token_ids=ids)))

    def going_on(self, *, wait: bool) -> Sequence[tuple[int, ConversationRow]]:
        ready, self.waiting = self.waiting, []
        return ready


def test_each_answer_of_a_conversation_has_the_form() -> None:
    asks = Asks()
    made = generate(
        model(), rows(), FORM, Stops.of(renderer()), seed=SEED, step=STEP, conversing=asks
    )
    found = []
    for place in range(9):
        row, sample = divmod(place, 3)
        first = slowly(rows()[row].token_ids, FORM, row, sample, 0)
        later = [slowly(asks.prompts[place, turn], FORM, row, sample, turn) for turn in (1, 2)]
        found.append([*first, *later[0], *later[1]])
    assert answers_in(made) == found


def test_a_sessions_samples_and_log_probs_are_those_of_the_loop() -> None:
    stops, prompt = Stops.of(renderer()), rows()[1].token_ids
    with Conversations(model(), stops, slots=2, max_tokens=96) as talk:
        handles = talk.submit_samples(prompt, FORM, seed=SEED, samples=4, top_logprobs=3)
        while talk.busy:
            talk.step()
    for sample, handle in enumerate(handles):
        answer = [*handle.token_ids, handle.stop_token]
        assert answer == slowly(prompt, FORM, 0, sample, step=0)
        with torch.no_grad():
            logits = model()(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
        own = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        for place, told in enumerate(handle.logprobs):
            assert told.logprob == pytest.approx(float(own[place, answer[place]]), abs=1e-4)
            best = own[place].topk(3)
            assert [token for token, _ in told.top] == best.indices.tolist()


def rolled(world: World, parts: int, talks: bool) -> list[list[int]]:
    config = RunConfig(parallel=ParallelConfig())
    whole = tiny_llama(len(renderer().pieces.tokenizer)).eval()
    prepare_for_training(whole, engine_settings(config), 0)
    shard_model(whole, shard_plan(2, engine_settings(config), world, trained=True), world)
    group, stops = tensor_group(world, parts), Stops.of(renderer())
    with torch.no_grad(), generation_weights(whole, group):
        settings = replace(engine_settings(config), sampling=FORM, seed=SEED)
        asks = Asks() if talks else None
        return answers_in(
            shared_rollout(whole, rows(), settings, stops, step=STEP, group=group, conversing=asks)
        )


@pytest.mark.parametrize("parts", [1, 2], ids=["each its answers", "slices"])
def test_two_ranks_draw_what_a_slow_loop_draws(parts: int) -> None:
    found = expected(FORM)
    for theirs in on_ranks(2, rolled, parts, False):
        assert theirs == found


def test_conversations_over_two_ranks_are_those_of_one() -> None:
    stops = Stops.of(renderer())
    made = generate(model(), rows(), FORM, stops, seed=SEED, step=STEP, conversing=Asks())
    for theirs in on_ranks(2, rolled, 1, True):
        assert theirs == answers_in(made)
