"""Answers that must have a form: the allowed tokens against words listed one by one, and draws
against slow loops."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tandem.config import answer_form
from tandem.config.answer_form import AnswerForm
from tandem.config.schema import SamplingConfig
from tandem.data.render import Renderer
from tandem.errors import GenerationError, NumericsError
from tandem.generation.constrained import (
    Constrainer,
    Constraint,
    allowed_tokens,
    constrainer_of,
)
from tandem.generation.generator import generate
from tandem.generation.limits import vocabulary_size
from tandem.generation.request import Request
from tandem.generation.sampler import Sampler
from tandem.generation.session import Session
from tandem.generation.stops import Stops
from tandem.generation.streaming import Conversations, Turns
from tandem.serve.token_bytes import TokenBytes
from tandem.types import PromptRow, Rollout
from tests.data.built_tokenizers import CHATML, PLAIN, THINKING, byte_level, folding
from tests.generation.cuda_stand_ins import stand_in
from tests.generation.gpu_sessions import in_buckets
from tests.models.families import tiny_model
from tests.tiny import tiny_llama

pytest.importorskip("llguidance")

WORDS = ("yes", "yellow", "no", "né", "n\n", "<|im_end", 'he said "hello there"')
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 22]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
THOUGHT_ENDS = byte_level().convert_tokens_to_ids("</think>")
ANY_TEMPLATE = {"ends in a line": CHATML, "ends in a space": PLAIN, "thinks": THINKING}


@cache
def renderer_of(template: str = CHATML) -> Renderer:
    return Renderer(byte_level(template))


@cache
def model_of(template: str = CHATML, extra: int = 0) -> PreTrainedModel:
    return tiny_llama(len(renderer_of(template).pieces.tokenizer) + extra)


def rows(*texts: str, template: str = CHATML) -> list[PromptRow]:
    return [renderer_of(template).prompt(text) for text in texts]


def answers(sampling: SamplingConfig, *texts: str, template: str = CHATML, **how: Any) -> Rollout:
    renderer = renderer_of(template)
    found = rows(*(texts or ("hello there", "how are you?")), template=template)
    return generate(model_of(template), found, sampling, Stops.of(renderer), seed=3, **how)


def allowed_by(constraint: Constraint) -> set[int]:
    """Ids that may come next; none once the answer has ended."""
    bits = constraint.bits()
    return set() if bits is None else set(unpacked(bits).nonzero()[0].tolist())


def unpacked(bits: np.ndarray) -> np.ndarray:
    return np.array([bool(int(word) >> i & 1) for word in bits for i in range(32)])


@pytest.mark.parametrize("template", [CHATML, PLAIN], ids=["line", "space"])
def test_allowed_tokens_are_those_that_some_word_goes_on_with(template: str) -> None:
    """Where all words go on alike, the tokens of that text as it is tokenized alone."""
    renderer = renderer_of(template)
    tokenizer = renderer.pieces.tokenizer
    plain = {i: TokenBytes(tokenizer).of(i) for i in range(len(tokenizer))}
    for i in renderer.pieces.control.ids.values():
        del plain[i]
    texts = {(word + trail).encode() for word in WORDS for trail in ("", renderer.trail)}
    prompt = renderer.prompt("hello there").token_ids
    first = constrainer_of(renderer).answer(AnswerForm.of_choice(WORDS), prompt)
    lead = renderer.pieces.encode(renderer.lead, "\ue0ff", "", "")
    assert first.take_all(lead) == len(lead)
    seen, ways = {b""}, [(first, b"")]
    while ways:
        constraint, written = ways.pop()
        allowed = allowed_by(constraint)
        on = [text for text in texts if text.startswith(written)]
        expected = {i for i, raw in plain.items() if any(t.startswith(written + raw) for t in on)}
        ends = set(renderer.stop_token_ids) if written in texts else set()
        goes_on_alike = len({text[len(written) : len(written) + 1] for text in on}) == 1
        if not goes_on_alike or ends:
            assert allowed == expected | ends, written
        else:
            assert allowed
            assert allowed <= expected, written
        for token in allowed - ends:
            if (after := written + plain[token]) not in seen:
                seen.add(after)
                further = constraint.copy()
                further.take(token)
                ways.append((further, after))
    assert texts <= seen
    first.take(renderer.terminator_id)  # whatever came before it
    assert first.bits() is None
    assert first.problem == ""


def test_control_tokens_are_never_text() -> None:
    renderer = renderer_of()
    constraint = constrainer_of(renderer).text(AnswerForm.of_regex(r"(?s:.*)"))
    held, stops = allowed_by(constraint), set(renderer.stop_token_ids)
    assert held & set(renderer.pieces.control.ids.values()) == stops
    assert len(held) > 200


V = 40


@pytest.mark.parametrize(
    "knobs",
    [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 0.5},
     {"logit_bias": ("7:4",)}, {"min_new_tokens": 4}],
    ids=str,
)  # fmt: skip
def test_a_draw_is_of_the_allowed_tokens_alone(knobs: dict[str, Any]) -> None:
    n, stop = 4000, 3
    generator = torch.Generator().manual_seed(1)
    row = 3 * torch.randn(V, generator=generator)
    allowed = torch.rand(V, generator=generator) < 0.3
    allowed[[stop, 7]] = True
    sampling = SamplingConfig(**knobs)
    sampler = Sampler(sampling, (stop,), torch.device("cpu"), V)
    keys, numbers = torch.arange(n) * 7919, torch.full((n,), 2)
    drawn = sampler.draw(row.repeat(n, 1), keys, numbers, None, allowed.repeat(n, 1))

    changed = row.clone()  # a slow loop over one row
    for token in range(V):
        changed[token] += sampling.logit_biases().get(token, 0.0)
        if not allowed[token] or (token == stop and sampling.min_new_tokens > 2):
            changed[token] = -torch.inf
    shares = (changed / sampling.temperature).softmax(0)
    order = shares.argsort(descending=True).tolist()
    kept, reached = [], 0.0
    for place, token in enumerate(order):
        if sampling.top_k and place >= sampling.top_k:
            break
        if reached >= sampling.top_p or shares[token] < sampling.min_p * shares[order[0]]:
            break
        kept.append(token)
        reached += float(shares[token])
    expected = torch.zeros(V)
    expected[kept] = shares[kept] / shares[kept].sum()
    counted = torch.bincount(drawn.tokens, minlength=V) / n
    assert (counted - expected).abs().max() < 0.03
    assert set(drawn.tokens.tolist()) <= set(kept)
    torch.testing.assert_close(drawn.sampled_logprobs, expected.log()[drawn.tokens])
    own = (row / sampling.temperature).log_softmax(0)
    torch.testing.assert_close(drawn.logprobs, own[drawn.tokens])
    torch.testing.assert_close(drawn.entropy, -(own.exp() * own).sum().expand(n))


def test_a_form_that_has_ended_ends_an_answer_early() -> None:
    """`min_new_tokens` waits for stop tokens only where there is something else."""
    sampler = Sampler(SamplingConfig(min_new_tokens=9), (1, 2), torch.device("cpu"), 6)
    allowed = torch.tensor([[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    drawn = sampler.draw(torch.zeros(2, 6), torch.arange(2), torch.zeros(2).long(), None, allowed)
    assert drawn.tokens[0] in (1, 2)
    assert drawn.tokens[1] == 4
    nothing = sampler.draw(
        torch.zeros(2, 6), torch.arange(2), torch.zeros(2).long(), None, ~allowed & False
    )
    assert nothing.sampled_logprobs.isnan().all()


@pytest.mark.parametrize("extra", [0, 37], ids=["as many tokens", "more tokens"])
def test_allowed_rows_stand_beside_free_ones(extra: int) -> None:
    renderer = renderer_of()
    size, prompt = len(renderer.pieces.tokenizer) + extra, renderer.prompt("yes").token_ids
    sampler = Sampler(SamplingConfig(), (), torch.device("cpu"), size)
    formed = constrainer_of(renderer).answer(AnswerForm.of_choice(["42"]), prompt)
    requests = [Request(0, prompt, 1, sampler, 5), Request(1, prompt, 2, sampler, 5, None, formed)]
    assert allowed_tokens(requests[:1], size, torch.device("cpu")) is None
    found = allowed_tokens(requests, size, torch.device("cpu"))
    assert found is not None
    assert found.shape == (2, size)
    assert found[0].all()
    texts = [renderer.continuation([i]) for i in found[1].nonzero().flatten().tolist()]
    assert texts
    assert set(texts) <= {"4", "42"}
    small = allowed_tokens(requests, 30, torch.device("cpu"))
    assert small is not None
    assert torch.equal(small, found[:, :30])


@pytest.mark.parametrize("template", ANY_TEMPLATE.values(), ids=ANY_TEMPLATE)
def test_every_way_of_drawing_gives_the_same_answers_of_the_form(template: str) -> None:
    sampling = SamplingConfig(
        json_schema=json.dumps(PERSON),
        max_new_tokens=90,
        samples_per_prompt=3,
        logit_bias=(f"{THOUGHT_ENDS}:9",),
    )
    made = answers(sampling, template=template)
    one_by_one = answers(sampling, template=template, batch_size=1, share_prompts=False)
    by_hugging_face = answers(sampling, template=template, by_hugging_face=True)
    for other in (one_by_one, by_hugging_face):
        assert other.responses == made.responses
        torch.testing.assert_close(other.sampled_logprobs, made.sampled_logprobs, atol=2e-5, rtol=0)
    assert made.finished.any()
    for text, is_whole in zip(made.responses, made.finished.tolist(), strict=True):
        said = text.rpartition("</think>")[2]
        if is_whole:
            found = json.loads(said)
            assert found.keys() == {"name", "age"}
            assert found["age"] in (1, 22)
            assert len(found["name"]) <= 4
    mask = made.batch.response_mask
    assert (made.sampled_logprobs >= made.rollout_logprobs - 1e-5)[mask].all()
    assert (made.sampled_logprobs > made.rollout_logprobs + 0.1)[mask].any()


def test_log_probs_are_the_policys_own() -> None:
    sampling = SamplingConfig(regex="[a-f]{3,9}", max_new_tokens=12, temperature=0.8)
    made = answers(sampling)
    batch = made.batch
    with torch.no_grad():
        logits = model_of()(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
    own = (logits[:, :-1] / 0.8).log_softmax(-1)
    own = own.gather(2, batch.token_ids[:, 1:, None])[..., 0]
    mask = batch.response_mask[:, 1:]
    torch.testing.assert_close(made.rollout_logprobs[:, 1:][mask], own[mask], atol=1e-5, rtol=0)
    for text in made.responses:
        assert re.fullmatch("[a-f]{3,9}", text)


def test_a_sessions_other_answers_stay_as_they_are() -> None:
    renderer = renderer_of()
    prompt = renderer.prompt("hello there").token_ids
    free = SamplingConfig(max_new_tokens=20)
    formed = replace(free, regex="(ab|cd)+")

    def texts(*samplings: SamplingConfig) -> list[str]:
        with Conversations(model_of(), Stops.of(renderer), slots=4, max_tokens=64) as talk:
            handles = [talk.submit(prompt, s, seed=i) for i, s in enumerate(samplings)]
            while talk.busy:
                talk.step()
        assert all(handle.error is None for handle in handles)
        return [renderer.decode(handle.token_ids) for handle in handles]

    together = texts(free, formed, free, formed)
    assert together == [
        *texts(free), texts(free, formed)[1], texts(free, free, free)[2],
        texts(free, free, free, formed)[3],
    ]  # fmt: skip
    assert all(re.fullmatch("(ab|cd)*[ac]?", together[i]) for i in (1, 3))
    assert together[1] != together[3]
    turns = Turns(model_of(), Stops.of(renderer))
    assert renderer.decode(list(turns.stream(prompt, formed, seed=1))) == together[1]
    turns.close()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_on_a_gpu_the_recorded_step_leaves_such_draws_to_the_rows(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """With kernels' stand-ins: tokens are read a step late, and forms are followed all the same."""
    stand_in(monkeypatch)
    sampling = SamplingConfig(
        regex="(yes|no), [a-z ]{2,6}", max_new_tokens=20, samples_per_prompt=2
    )
    expected = answers(sampling)
    seen = in_buckets(monkeypatch, late=late)
    made = answers(sampling)
    assert made.responses == expected.responses
    assert made.finished.all()
    assert seen.forwards() > 0
    assert seen.drawn <= late  # for answers that have ended


def test_a_model_that_the_native_decoder_does_not_know() -> None:
    """Through the families' own modules, of a vocabulary that is not the tokenizer's."""
    renderer = renderer_of()
    model = tiny_model("gemma2")
    assert vocabulary_size(model) != len(renderer.pieces.tokenizer)
    row = replace(rows("yes")[0], token_ids=(3, 4, 5))
    sampling = SamplingConfig(regex="[!-~]{4,}", max_new_tokens=9)
    with pytest.raises(GenerationError, match="need the conversation format"):
        generate(model, [row], sampling, Stops((2,), 2, str))
    made = generate(model, [row], sampling, Stops.of(renderer))
    assert re.fullmatch("[!-~]{4,9}", made.responses[0])


def test_thoughts_come_first_where_the_prompt_begins_them() -> None:
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    renderer = renderer_of(template)
    prompt = renderer.prompt("hello there").token_ids
    constraint = constrainer_of(renderer).answer(AnswerForm.of_choice(["42"]), prompt)
    encode = renderer.pieces.encode
    before = "assistant\n<think>\n"
    thought = encode("Hm, yes\n\n", "\ue0ff", before, "")
    assert constraint.take_all(thought) == len(thought)
    assert allowed_by(constraint).isdisjoint(renderer.stop_token_ids)
    end = [renderer.pieces.control.ids["</think>"]]
    rest = [*end, *encode("\n\n", "\ue0ff", "</think>", "")]
    assert constraint.take_all(rest) == len(rest)
    words = encode("hello", "\ue0ff", "\n\n", "")
    assert constraint.copy().take_all(words) == 0
    answer = encode("42", "\ue0ff", "\n\n", "")
    assert constraint.take_all(answer) == len(answer)


def test_a_model_may_think_where_its_template_names_the_tags() -> None:
    renderer = renderer_of(THINKING)
    prompt = renderer.prompt("hello there").token_ids
    form = AnswerForm.of_choice(["42"])
    tag = [renderer.pieces.control.ids["<think>"]]
    assert constrainer_of(renderer).answer(form, prompt, tag)
    plain = renderer_of()
    tag = [plain.pieces.control.ids["<think>"]]
    with pytest.raises(GenerationError, match="beginning of an answer must have the form"):
        constrainer_of(plain).answer(form, plain.prompt("hello there").token_ids, tag)


def test_what_is_asked_for_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for knobs, said in (
        ({"regex": "(?=a)b"}, "sampling.regex must be a regular expression that can be followed"),
        (
            {"json_schema": '{"type": "thing"}'},
            "sampling.json_schema must be a JSON Schema that can",
        ),
        ({"json_schema": "{"}, "sampling.json_schema must be a JSON Schema; got what is not JSON"),
        ({"json_schema": "nowhere.json"}, "or a file of one that can be read; got 'nowhere.json'"),
    ):
        with pytest.raises(GenerationError, match=re.escape(said)) as caught:
            answers(SamplingConfig(**knobs))
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith("docs/answer_forms.md has the limits.")
    words = Renderer(folding())
    with pytest.raises(GenerationError, match="a tokenizer that can write any byte"):
        Constrainer(words)
    few = AnswerForm.of_regex("[a-z]").check()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'tandem-rlhf\[forms\]'"):
        few.check()


@pytest.mark.parametrize(
    "grammar", ["start: start", "start: A\nA: /a/ & /b/", "start: @answer", "start: /[^\\s\\S]/"]
)
def test_a_form_that_no_text_has_is_refused(grammar: str) -> None:
    form = AnswerForm("lark", grammar).check()
    with pytest.raises(GenerationError, match="form must be one that can be followed"):
        Constrainer(renderer_of()).text(form)


def test_an_answer_that_cannot_have_its_form_any_more_does_not_end_as_if_it_had() -> None:
    form = AnswerForm("lark", 'start: "a" x | "a" Y\nx: x\nY: /[^\\s\\S]/').check()
    renderer, model = renderer_of(), model_of()
    constrainer = Constrainer(renderer)
    talk = Conversations(model, Stops.of(renderer), slots=1)
    with talk:
        made = constrainer.text(form)
        (handle,) = talk.submit_samples((1, 2), SamplingConfig(), seed=1, constraint=made)
        while not handle.ended:
            talk.step()
    assert handle.stop_token is None
    assert isinstance(handle.error, GenerationError)
    said = "it left none at token 2: no text goes on from here and has the form. Ask for"
    assert said in str(handle.error)


def test_a_long_text_that_is_forced_is_not_followed_to_its_end() -> None:
    steep = AnswerForm.of_regex("((a{1000}){1000}){1000}").check()
    made = Constrainer(renderer_of()).text(steep)
    for _ in range(5):
        (token,) = allowed_by(made)
        assert renderer_of().continuation([token]) == "a"
        made.take(token)


def test_a_form_that_the_model_cannot_write_is_told_apart_from_nan() -> None:
    renderer, model = renderer_of(), tiny_llama(20)  # it has none of the letters' tokens
    prompt = replace(rows("yes")[0], token_ids=(1, 2, 3))
    sampling = SamplingConfig(regex="[x-z]+", max_new_tokens=4)
    ways: list[dict[str, Any]] = [{}, {"by_hugging_face": True}]
    for how in ways:
        with pytest.raises(GenerationError, match="the model has no token for what must come"):
            generate(model, [prompt], sampling, Stops.of(renderer), **how)
    broken = tiny_llama(len(renderer.pieces.tokenizer))
    broken.lm_head.weight.data[:] = torch.nan
    with pytest.raises(NumericsError, match="Look for NaN"):
        generate(broken, rows("yes"), sampling, Stops.of(renderer))


def test_sessions_that_keep_numbers_do_not_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Session.run` draws many tokens in one call, but not of answers with a form."""
    calls: list[int] = []
    whole = Session._advance

    def advancing(self: Session) -> None:
        before = self._reading.step
        whole(self)
        calls.append(self._reading.step - before)

    monkeypatch.setattr(Session, "_advance", advancing)
    answers(SamplingConfig(regex="[a-d]{9}", max_new_tokens=12))
    assert calls
    assert not any(calls)


def test_a_real_tokenizer_of_words_with_spaces(shared: Path) -> None:
    """The answer's first word has the space that the template and the tokenizer put there."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
    renderer = Renderer(tokenizer)
    assert renderer.lead == " "
    prompt = renderer.prompt("Is it?")
    row = renderer.conversation(prompt.messages, "yes", prompt.source)
    ids = row.token_ids[len(prompt) : -1]
    constraint = constrainer_of(renderer).answer(
        AnswerForm.of_choice(["yes", "no"]), prompt.token_ids
    )
    assert constraint.take_all(ids) == len(ids)
    assert renderer.terminator_id in allowed_by(constraint)


def test_beside_tools_a_rollouts_answer_is_of_the_form_or_a_call() -> None:
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content or '' }}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>"
        "{% endfor %}",
    ).replace("{% for m", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m", 1)
    renderer = renderer_of(template)
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    row = renderer.prompt("how are you?", tools=[tool])
    sampling = SamplingConfig(regex="(yes|no)!", max_new_tokens=60, samples_per_prompt=24)
    made = generate(model_of(template), [row], sampling, Stops.of(renderer), seed=2)
    whole = [text for text, ended in zip(made.responses, made.finished, strict=True) if ended]
    turns = [renderer.spoken(text, row.tools, row.messages) for text in whole]
    assert not [turn.problem for turn in turns if turn.problem]
    said = {turn.turn.content for turn in turns if not turn.turn.tool_calls}
    assert said <= {"yes!", "no!"}
    assert said
    assert any(turn.turn.tool_calls for turn in turns)


def test_rules_that_can_be_followed_in_many_ways_at_once_are_refused() -> None:
    """A step's time is of the third power of their number, which is counted from the first on."""
    constrainer = Constrainer(renderer_of())

    def rules(number: int) -> AnswerForm:
        ways = "|".join(f"r{i}" for i in range(number))
        lines = [f'r{i}: s s | "a"' for i in range(number)]
        return AnswerForm.of_grammar("\n".join([f"start: s\ns: {ways}", *lines])).check()

    assert constrainer.text(rules(20)).bits() is not None
    with pytest.raises(GenerationError, match="got: it may go on in too many ways at once: give"):
        constrainer.text(rules(250))
    with pytest.raises(GenerationError, match="got: its patterns are too large: shorten them, or"):
        constrainer.text(AnswerForm.of_regex("[a-z]{0,1000}" * 1000).check())
    choice = AnswerForm.of_choice([f"the {i}th" for i in range(1000)]).check()
    assert constrainer.text(choice).bits() is not None


def drawn(constraint: Constraint, seed: int, most: int = 120) -> list[int]:
    """Tokens that the form allows, any of them equally likely, and its end."""
    chosen, ids = np.random.default_rng(seed), list[int]()
    while (bits := constraint.bits()) is not None and len(ids) < most:
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        assert len(allowed), constraint.stuck()
        ids.append(int(chosen.choice(allowed)))
        constraint.take(ids[-1])
    return ids


def test_letters_of_all_alphabets_in_a_real_vocabulary(shared: Path) -> None:
    renderer = Renderer(AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2"))
    constrainer, form = Constrainer(renderer), AnswerForm.of_regex(r"\p{Lu}\w+").check()
    for seed in range(8):
        assert drawn(constrainer.text(form), seed, most=4)


def test_a_form_is_followed_however_many_answers_had_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's lexer lets no answer go on once it has had too many states: the grammar is then
    compiled again, also for answers in progress, which draw what they would have drawn alone."""
    limits = answer_form.parser_limits(has_rules=False) | {"max_lexer_states": 400}
    monkeypatch.setattr(answer_form, "parser_limits", lambda *, has_rules: limits)
    renderer = Renderer(AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2"))
    form = AnswerForm.of_regex("[a-z ]{100,200}[A-Z]{100,200}").check()
    together = Constrainer(renderer)
    begun = [together.text(form) for _ in range(3)]
    begun.append(begun[0].copy())
    ids = [drawn(constraint, seed, most=60) for seed, constraint in enumerate(begun)]
    for seed, (constraint, sofar) in enumerate(zip(begun, ids, strict=True)):
        alone = Constrainer(renderer).text(form)
        assert alone.take_all(sofar) == len(sofar)
        assert drawn(constraint, seed) == drawn(alone, seed)
