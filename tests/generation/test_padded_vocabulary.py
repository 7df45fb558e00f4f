"""A model with more outputs than its tokenizer has tokens draws as one without the others.

The others' logits are by far the largest, so that whoever forgets the bound draws them at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.config.answer_form import AnswerForm
from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.generation.constrained import constrainer_of
from tandem.generation.generator import generate
from tandem.generation.native_runner import NativeRunner
from tandem.generation.sampler import Sampler, TokenCounts
from tandem.generation.speculative import Speculator
from tandem.generation.stops import Stops
from tandem.generation.streaming import Conversations, Handle, Turns
from tandem.models.load import load_causal_lm
from tandem.ops import dense
from tandem.types import Rollout
from tests.generation.cuda_stand_ins import stand_in
from tests.generation.gpu_sessions import found_by_address, in_buckets
from tests.generation.rollouts import CPU, LENGTHS, STOPS, bitwise, new_wide, prompts
from tests.generation.test_speculative import told
from tests.tiny import save_padded_model

KNOWN, MODEL = 90, 99  # ids of the tokenizer, outputs of the model
BOUND = replace(STOPS, num_ids=KNOWN)


def cut(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without the outputs that the tokenizer has no tokens for."""
    head, made = model.get_output_embeddings(), new_wide(model.config.model_type, model.dtype)
    made.load_state_dict(model.state_dict())
    narrow = nn.Linear(head.in_features, KNOWN, bias=head.bias is not None, dtype=model.dtype)
    narrow.weight.data = head.weight.data[:KNOWN].clone()
    if head.bias is not None:
        narrow.bias.data = head.bias.data[:KNOWN].clone()
    made.lm_head = narrow
    made.config.tie_word_embeddings = False
    return made.eval()


def padded(family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The other outputs come in pairs of opposite sign, so that one is always large."""
    model = new_wide(family, dtype)
    weight = model.get_output_embeddings().weight.data
    for i in range(KNOWN, MODEL):
        sign = 1 if i % 2 else -1
        weight[i] = sign * 40 * weight[4 + i // 2 - KNOWN // 2]
    return model


def answered(
    model: PreTrainedModel, stops: Stops = BOUND, *, knobs: Any = None, **how: Any
) -> Rollout:
    sampling = SamplingConfig(**{"max_new_tokens": 40, "samples_per_prompt": 2, **(knobs or {})})
    rows = prompts(*LENGTHS, vocabulary=KNOWN)
    return generate(model, rows, sampling, stops, seed=3, step=1, **how)


def assert_drawn_alike(one: Rollout, other: Rollout, *, exactly: bool) -> None:
    """Tokens, and log-probs under the distribution that they were drawn from."""
    assert one.responses == other.responses
    if exactly:
        assert torch.equal(one.sampled_logprobs, other.sampled_logprobs)
    else:
        torch.testing.assert_close(one.sampled_logprobs, other.sampled_logprobs)


KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "least length": {"min_new_tokens": 25},
    "greedy": {"top_k": 1},
    "top-k": {"top_k": 5},
    "top-k of more than there are": {"top_k": KNOWN + 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "biases": {"logit_bias": ("7:3", "2:-inf", f"{KNOWN + 2}:50"), "top_p": 0.9},
}


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("path", ["session", "generate", "graphs"])
def test_it_draws_as_without_the_others(
    knobs: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every path, under every rule; log-probs and entropy are of all outputs."""
    model, how = padded(), {"knobs": KNOBS[knobs], "by_hugging_face": path == "generate"}
    if path == "graphs":
        stand_in(monkeypatch)
        found_by_address(monkeypatch)
        seen = in_buckets(monkeypatch)
    made = answered(model, **how)
    if path == "graphs":
        assert seen.refused() == {}
        assert "penalties" in knobs or seen.drawn > 0
    tokens = made.batch.token_ids[made.batch.response_mask]
    assert int(tokens.max()) < KNOWN
    if "logit_bias" in KNOBS[knobs]:
        how["knobs"] = KNOBS[knobs] | {"logit_bias": KNOBS[knobs]["logit_bias"][:2]}
    assert_drawn_alike(made, answered(cut(model), STOPS, **how), exactly=path == "session")
    temperature = KNOBS[knobs].get("temperature", 1.0)
    with torch.no_grad():
        for row in range(0, len(made), 5):
            ids = made.batch.token_ids[row : row + 1, : int(made.batch.lengths()[row])]
            logits = model(ids).logits[0, :-1] / temperature
            logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            mask = made.batch.response_mask[row, 1 : ids.shape[1]]
            found = made.rollout_logprobs[row, 1 : ids.shape[1]]
            torch.testing.assert_close(found[mask], logprobs[mask], rtol=1e-4, atol=1e-3)
            assert float(found[mask].max()) < -5, "the others have nearly all the probability"


@bitwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("knobs", ["plain", "temperature", "least length"])
def test_many_steps_in_one_call_stay_one_call(
    dtype: torch.dtype, knobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is no rule that a sampler is not plain with."""
    advance, made = NativeRunner.advance, []

    def counted(self: NativeRunner, *given: Any) -> Any:
        made.append(advance(self, *given))
        return made[-1]

    monkeypatch.setattr(NativeRunner, "advance", counted)
    model = padded(dtype=dtype)
    together = answered(model, knobs=KNOBS[knobs])
    assert made
    assert all(part is not None for part in made)
    assert sum(part.steps for part in made) > 20
    monkeypatch.setattr(NativeRunner, "advance", lambda *given: None)
    one_by_one = answered(model, knobs=KNOBS[knobs])
    assert_drawn_alike(together, one_by_one, exactly=True)
    for name in ("rollout_logprobs", "rollout_entropy"):
        assert torch.equal(getattr(together, name), getattr(one_by_one, name))


@pytest.mark.parametrize("by_hugging_face", [False, True])
def test_without_the_bound_the_others_are_drawn(by_hugging_face: bool) -> None:
    made = answered(padded(), STOPS, by_hugging_face=by_hugging_face)
    tokens = made.batch.token_ids[made.batch.response_mask]
    assert float((tokens >= KNOWN).float().mean()) > 0.9


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_tokenizer_of_all_tokens_changes_no_bit(knobs: str) -> None:
    model = new_wide()
    whole = answered(model, STOPS, knobs=KNOBS[knobs])
    for num_ids in (MODEL, MODEL + 20):
        made = answered(model, replace(STOPS, num_ids=num_ids), knobs=KNOBS[knobs])
        assert torch.equal(made.batch.token_ids, whole.batch.token_ids)
        for name in Rollout.PER_TOKEN:
            assert torch.equal(getattr(made, name), getattr(whole, name)), name


@pytest.mark.parametrize("knobs", ["plain", "least length", "top-p", "penalties", "biases"])
def test_shares_of_draws_are_those_of_a_slow_softmax(knobs: str) -> None:
    """Among the tokens that the tokenizer has, 40,000 draws of one distribution."""
    draws, known, wide = 40_000, 8, 12
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(wide, generator=generator)
    logits[known:] += 8.0
    own = KNOBS[knobs] | ({"logit_bias": ("3:2", "2:-inf", "9:5")} if knobs == "biases" else {})
    sampling = SamplingConfig(**own)
    sampler = Sampler(sampling, (2, 10), CPU, wide, known)
    counts = TokenCounts(1, wide, CPU)
    counts.begin(0, (1, 5, 9))
    counts.add(slice(0, 1), torch.tensor([5]))
    expanded = tuple(part.expand(draws, -1) for part in counts.of(slice(0, 1)))
    keys, numbers = torch.arange(draws) * 2654435761, torch.zeros(draws, dtype=torch.long)
    made = sampler.draw(logits.expand(draws, -1), keys, numbers, expanded)
    changed = logits[:known].double().tolist()
    for token in range(known):
        seen, often = token in (1, 5), int(token == 5)
        if seen and changed[token] > 0:
            changed[token] /= sampling.repetition_penalty
        elif seen:
            changed[token] *= sampling.repetition_penalty
        changed[token] -= sampling.frequency_penalty * often + sampling.presence_penalty * often
        changed[token] += sampling.logit_biases().get(token, 0.0)
    if sampling.min_new_tokens:
        changed[2] = -torch.inf
    expected = torch.softmax(torch.tensor(changed, dtype=torch.float64), 0)
    kept, reached = torch.zeros(known, dtype=torch.bool), 0.0
    for token in expected.argsort(descending=True).tolist():
        kept[token] = reached < sampling.top_p
        reached += float(expected[token])
    expected = expected * kept / expected[kept].sum()
    found = made.tokens.bincount(minlength=wide).double() / draws
    assert not found[known:].any()
    assert not found[:known][expected == 0].any()
    real = expected > 0
    spread = (expected[real] / draws).sqrt()
    assert bool(((found[:known][real] - expected[real]).abs() < 5 * spread).all())
    torch.testing.assert_close(
        made.sampled_logprobs.double(), expected[made.tokens].log(), rtol=0, atol=1e-5
    )
    scored, entropy = dense.token_logprobs(logits.expand(draws, -1), made.tokens, 1.0)
    assert torch.equal(made.logprobs, scored)
    assert torch.equal(made.entropy, entropy)


@pytest.mark.parametrize("knobs", [{}, {"top_p": 0.9}, {"min_new_tokens": 3}])
def test_a_nan_that_could_not_be_drawn_is_told_too(knobs: dict[str, float]) -> None:
    logits = torch.zeros(3, 12)
    logits[1, 10] = torch.nan
    sampler = Sampler(SamplingConfig(**knobs), (2,), CPU, 12, 8)
    made = sampler.draw(logits, torch.arange(3), torch.zeros(3, dtype=torch.long))
    assert made.logprobs.isnan().tolist() == [False, True, False]
    assert made.sampled_logprobs.isnan().tolist() == [False, True, False]


def test_a_tokenizer_without_tokens() -> None:
    with pytest.raises(GenerationError, match=r"num_ids must be above 0, or None .* got 0"):
        Sampler(SamplingConfig(), (2,), CPU, 12, 0)


def talked(model: PreTrainedModel, stops: Stops, **how: Any) -> list[Handle]:
    """Answers that stream side by side, each of another rule, with their likeliest tokens."""
    with Conversations(model, stops, slots=4, max_tokens=120, **how) as talk:
        handles = [
            handle
            for number, row in enumerate(prompts(20, 5, 33, vocabulary=KNOWN))
            for handle in talk.submit_samples(
                row.token_ids,
                SamplingConfig(max_new_tokens=40, **list(KNOBS.values())[3 * number]),
                seed=number,
                top_logprobs=4,
            )
        ]
        while talk.busy:
            talk.step()
    return handles


def listed(handles: Sequence[Handle]) -> set[int]:
    return {token for handle in handles for entry in handle.logprobs for token, _ in entry.top}


def test_streams_draw_none_of_them_and_list_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = padded()
    plain = talked(model, BOUND, speculate=False)
    assert all(token < KNOWN for handle in plain for token in handle.token_ids)
    assert max(listed(plain)) < KNOWN
    assert all(handle.logprobs[0].logprob < -5 for handle in plain), "the softmax is of all"
    assert max(listed(talked(model, STOPS, speculate=False))) >= KNOWN
    assert list(Turns(model, BOUND).stream((5, 6, 7), SamplingConfig(max_new_tokens=8), seed=0))
    monkeypatch.setattr(Speculator, "drafts", told(plain, random.Random(5)))
    ahead = talked(model, BOUND)
    assert [handle.token_ids for handle in ahead] == [handle.token_ids for handle in plain]
    assert [handle.logprobs for handle in ahead] == [handle.logprobs for handle in plain]


def test_streams_through_hugging_face_draw_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = padded()
    plain = talked(model, BOUND, speculate=False)
    monkeypatch.setattr("tandem.generation.streaming.decodes", lambda model: False)
    theirs = talked(model, BOUND)
    assert [handle.token_ids for handle in theirs] == [handle.token_ids for handle in plain]
    assert max(listed(theirs)) < KNOWN


def test_the_bound_is_the_tokenizers_highest_id(tmp_path: Any) -> None:
    """Of a model as it is saved; with a form beside answers without one, too."""
    from tandem.data.render import Renderer
    from tandem.models.load import load_tokenizer

    folder = save_padded_model(tmp_path / "padded")
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    renderer = Renderer(tokenizer)
    stops = Stops.of(renderer)
    assert stops.num_ids == max(tokenizer.get_vocab().values()) + 1
    assert stops.num_ids < model.config.vocab_size
    row = renderer.prompt("hello")
    made = generate(model, [row], SamplingConfig(max_new_tokens=30, samples_per_prompt=8), stops)
    assert int(made.batch.token_ids.max()) < stops.num_ids
    form = constrainer_of(renderer).answer(AnswerForm("regex", "[a-z ]{20,40}"), row.token_ids)
    with Conversations(model, stops, slots=4, max_tokens=120) as talk:
        handles = [
            talk.submit_samples(
                row.token_ids, SamplingConfig(max_new_tokens=30, min_new_tokens=5), seed=seed,
                constraint=form.copy() if seed % 2 else None,
            )[0]
            for seed in range(4)
        ]  # fmt: skip
        while talk.busy:
            talk.step()
    assert all(handle.error is None for handle in handles)
    assert max(max(handle.token_ids) for handle in handles) < stops.num_ids
