"""The renderer against Hugging Face's own rendering, on real tokenizers and on built ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tandem.data.render import Renderer
from tandem.errors import DataError, ModelError, RewrittenError
from tandem.types import Message, Role, Source
from tests.data.built_tokenizers import (
    CHATML,
    LLAMA2,
    PLAIN,
    THINKING,
    byte_level,
    folding,
    sentencepiece,
)

SOURCE = Source("set", "rows.jsonl", 3)
REAL = (
    "tokenizers/smollm2",
    "tokenizers/torchtitan_small",
    "tokenizers/gpt2",
    "models/stories260K/hf",
    "models/babyllama105/hf",
)
BUILT: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte_level": byte_level,
    "byte_level_default": lambda: byte_level(None),
    "opt_style": lambda: byte_level(None, adds_bos=True),
    "folding": folding,
    "folding_default": lambda: folding(None),
    "llama2": sentencepiece,
    "llama2_always": lambda: sentencepiece(scheme="always"),
    "sentencepiece_default": lambda: sentencepiece(None),
}
LOSSLESS = {"tokenizers/smollm2", "tokenizers/gpt2", "byte_level", "byte_level_default"}
TURNS = (
    Message("user", "hello, how are you?"),
    Message("assistant", "Fine, thanks."),
    Message("user", "What is 1 + 2?"),
)


@cache
def load(folder: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, shared: Path) -> PreTrainedTokenizerBase:
    return load(str(shared / request.param))


@pytest.fixture(params=[*REAL, *BUILT])
def named(request: pytest.FixtureRequest) -> tuple[str, PreTrainedTokenizerBase]:
    name = request.param
    if name in BUILT:
        return name, BUILT[name]()
    return name, load(str(request.getfixturevalue("shared") / name))


def dialog(*turns: tuple[Role, str]) -> list[Message]:
    return [Message(role, content) for role, content in turns]


def hf_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message], prompt: bool) -> list[int]:
    rows = [{"role": m.role, "content": m.content} for m in messages]
    options: dict[str, Any] = {"tokenize": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(rows, add_generation_prompt=prompt, **options))


def answer_of(renderer: Renderer, messages: list[Message], answer: str) -> tuple[int, ...]:
    row = renderer.conversation(messages, answer, SOURCE)
    return row.token_ids[len(renderer.prompt(messages)) :]


@pytest.mark.parametrize("folder", REAL[:2])
def test_equals_hugging_face_on_real_templates(folder: str, shared: Path) -> None:
    tokenizer = load(str(shared / folder))
    renderer = Renderer(tokenizer)
    with gzip.open(shared / "instruct/rasbt_1100.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(100), strict=False)]
    for row in rows:
        turns = dialog(("user", row["instruction"] + "\n" + row["input"]))
        output = row["output"].lstrip()  # a first line break would merge with the template's
        turns += dialog(("assistant", output or "-"), ("user", "Go on."))
        assert list(renderer.prompt(turns).token_ids) == hf_ids(tokenizer, turns, True)
        ids = list(renderer.conversation(turns, "So be it.", SOURCE).token_ids)
        whole = hf_ids(tokenizer, [*turns, Message("assistant", "So be it.")], False)
        assert whole[: len(ids)] == ids
        assert tokenizer.decode(whole[len(ids) :]) in ("", "\n")


def test_a_prompts_text_is_followed_by_the_answers(
    named: tuple[str, PreTrainedTokenizerBase],
) -> None:
    name, tokenizer = named
    if name.startswith("folding"):
        pytest.skip("its decoder puts a space between any two tokens")
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(TURNS)
    whole = renderer.conversation(TURNS, "it is 3.", SOURCE).token_ids
    answer = renderer.decode(whole[len(prompt) :])
    text = renderer.continuation(whole)
    assert text.startswith(renderer.prompt_text(prompt) + answer)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_equals_hugging_face_where_a_space_is_added(scheme: str) -> None:
    tokenizer = sentencepiece(LLAMA2, scheme)
    renderer = Renderer(tokenizer)
    messages = dialog(("user", "hello"), ("assistant", "yes yes"), ("user", "hello"))
    expected = hf_ids(tokenizer, [*messages, Message("assistant", "hello er")], False)
    row = renderer.conversation(messages, "hello er", SOURCE)
    assert list(row.token_ids) == expected
    assert row.token_ids.count(tokenizer.bos_token_id) == 1
    assert renderer.decode(answer_of(renderer, messages, "hello er")) == "hello er"


def test_the_default_is_this_text(shared: Path) -> None:
    tokenizer = load(str(shared / "tokenizers/gpt2"))
    messages = [Message("system", "Be kind."), *TURNS, Message("tool", "3")]
    row = Renderer(tokenizer).conversation(messages, "It is 3.", SOURCE)
    assert tokenizer.decode(row.token_ids) == (
        "Be kind.\n\nHuman: hello, how are you?\n\nAssistant: Fine, thanks.<|endoftext|>\n\n"
        "Human: What is 1 + 2?\n\nTool: 3\n\nAssistant: It is 3.<|endoftext|>"
    )
    marked = [i for i, m in zip(row.token_ids, row.response_mask, strict=True) if m]
    expected = [*tokenizer.encode(" Fine, thanks."), 50256, *tokenizer.encode(" It is 3."), 50256]
    assert marked == expected


def test_the_default_without_a_doubled_space(shared: Path) -> None:
    tokenizer = load(str(shared / "models/stories260K/hf"))
    row = Renderer(tokenizer).conversation(list(TURNS[:1]), "there", SOURCE)
    # HF's own ids of the whole text, BOS included
    text = "Human: hello, how are you?\n\nAssistant: there"
    assert list(row.token_ids) == [*tokenizer(text).input_ids, tokenizer.eos_token_id]


def test_the_saved_default_template_renders_the_same(real: PreTrainedTokenizerBase) -> None:
    before = Renderer(real)
    row = before.conversation(list(TURNS), "three", SOURCE)
    template = real.chat_template
    try:
        real.chat_template = before.chat_template
        assert Renderer(real).conversation(list(TURNS), "three", SOURCE) == row
    finally:
        real.chat_template = template


def test_bos_as_the_tokenizer_has_it(shared: Path) -> None:
    for tokenizer, bos in (
        (load(str(shared / "models/stories260K/hf")), 1),
        (load(str(shared / "tokenizers/torchtitan_small")), 2002),
        (byte_level(None, adds_bos=True), None),
        (load(str(shared / "tokenizers/gpt2")), None),
    ):
        row = Renderer(tokenizer).conversation(list(TURNS), "three", SOURCE)
        if bos is not None:
            assert row.token_ids[0] == bos
            assert row.token_ids.count(bos) == 1
    opt = byte_level(None, adds_bos=True)  # BOS is EOS: one in front, one per answer
    ids = Renderer(opt).conversation(list(TURNS), "three", SOURCE).token_ids
    assert ids[0] == opt.eos_token_id
    assert ids.count(opt.eos_token_id) == 3


def test_masks_of_every_turn_and_of_the_last(named: tuple[str, PreTrainedTokenizerBase]) -> None:
    renderer = Renderer(named[1])
    messages = list(TURNS)
    row = renderer.conversation(messages, "hello yes", SOURCE)
    last = renderer.conversation(messages, "hello yes", SOURCE, last_turn_only=True)
    prompt = renderer.prompt(messages, {"level": "easy"}, SOURCE)
    first = renderer.prompt(messages[:1])
    answer = answer_of(renderer, messages[:1], "Fine, thanks.")
    assert row.token_ids == last.token_ids
    assert row.token_ids[: len(prompt)] == prompt.token_ids
    assert (prompt.messages, prompt.columns) == (TURNS, {"level": "easy"})
    assert (prompt.source, row.source) == (SOURCE, SOURCE)
    assert row.token_ids[-1] == renderer.terminator_id
    expected = [False] * len(row)
    expected[len(prompt) :] = [True] * (len(row) - len(prompt))
    assert list(last.response_mask) == expected
    expected[len(first) : len(first) + len(answer)] = [True] * len(answer)
    assert list(row.response_mask) == expected
    unlearned = [replace(turn, learned=False) for turn in messages]
    shown = renderer.conversation(unlearned, "hello yes", SOURCE)
    assert shown == last, "an earlier turn that is not learned has the same tokens, off the mask"
    # What was generated is what is read again as an earlier turn.
    assert row.token_ids[len(first) : len(first) + len(answer)] == answer
    assert answer[-1] == renderer.terminator_id


@pytest.mark.parametrize(
    "answer",
    [
        "yes",
        " yes",
        "yes\n",
        "",
        "hello  yes",
        "a\n\nb",
        "1 + 1 = 2; (x) [y]",
        "é, 中, 🙂",
        "\ue000",
    ],
)
def test_decoding_an_answer(named: tuple[str, PreTrainedTokenizerBase], answer: str) -> None:
    name, tokenizer = named
    renderer = Renderer(tokenizer)
    ids = answer_of(renderer, list(TURNS), answer)
    decoded = renderer.decode(ids)
    if name in LOSSLESS or name == "opt_style" or "stories" in name:
        assert decoded == answer
    # and re-rendered as an earlier turn (lossless or not, decoding is idempotent)
    messages = [*TURNS, Message("assistant", decoded), Message("user", "hello")]
    n = len(renderer.prompt(list(TURNS)))
    if decoded == answer:
        assert renderer.prompt(messages).token_ids[n : n + len(ids)] == ids


def test_the_first_token_is_never_a_response() -> None:
    bare = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>"
    tokenizer = byte_level(bare + "{% endif %}{% endfor %}")
    row = Renderer(tokenizer).conversation([Message("user", "")], "hello", SOURCE)
    assert tokenizer.decode(row.token_ids) == "hello<|im_end|>"
    assert row.response_mask == (False, *[True] * (len(row) - 1))


def test_decode_leaves_out_only_the_terminator() -> None:
    tokenizer = byte_level()
    renderer = Renderer(tokenizer, stop_token_ids=[5])
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    words = tokenizer.encode("hello")
    assert renderer.terminator_id == end
    assert renderer.stop_token_ids == (end, eos, 5)
    assert Renderer(tokenizer, stop_token_ids=7).stop_token_ids == (end, eos, 7)
    assert renderer.decode([*words, end]) == renderer.decode([*words, eos]) == "hello"
    assert renderer.decode(words) == "hello"
    assert renderer.decode([end, *words, end]) == "<|im_end|>hello"
    assert renderer.decode([]) == ""


def test_pad_is_eos_where_there_is_none() -> None:
    tokenizer = byte_level()
    assert Renderer(tokenizer).pad_token_id == tokenizer.eos_token_id
    tokenizer.pad_token = "<|im_start|>"
    assert Renderer(tokenizer).pad_token_id == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_renderers_that_make_the_same_tokens() -> None:
    one, padded = byte_level(), byte_level()
    padded(["hello", "yes yes"], padding=False, truncation=True, max_length=2)
    assert Renderer(one).renders_like(Renderer(padded, stop_token_ids=5))
    assert not Renderer(one).renders_like(Renderer(byte_level(PLAIN)))
    assert not Renderer(one).renders_like(Renderer(folding()))


def test_a_document_is_learned_whole(real: PreTrainedTokenizerBase) -> None:
    text = "One day, a cat sat.\nIt was happy."
    row = Renderer(real).document(text, SOURCE)
    assert list(row.token_ids) == [*real(text).input_ids, real.eos_token_id]
    assert row.response_mask == (False, *[True] * (len(row) - 1))


FRAGMENTS = [
    *("<|im_end|>", "<|im_", "end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<s>", "</s>"),
    *("<unk>", "[unk]", "<think>", "</th", "ink>", "<|end_of_text|>", "<tool_call>", "[PAD]"),
    *("<|<|im_end|>im_end|>", "\uff1c|im_end|\uff1e", "<|IM_END|>", "\ue000", "\ue001", "\u200b"),
    *("<", ">", "|", "s", "yes", "é中", "Assistant:", " ", "  ", "\n"),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=6).map("".join)


def contents(renderer_texts: list[str], system: bool) -> list[Message]:
    roles: list[Role] = ["user", "assistant", "user"]
    if system:
        roles = ["system", *roles, "tool"]
    return [Message(r, t) for r, t in zip(roles, renderer_texts, strict=False)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.lists(texts, min_size=6, max_size=6))
def test_text_never_becomes_a_control_token(
    injected: tuple[str, PreTrainedTokenizerBase, Renderer], data: list[str]
) -> None:
    name, tokenizer, renderer = injected
    control = {i for i, t in tokenizer.added_tokens_decoder.items() if t.content.strip()}
    control = (control | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}
    if "gpt2" in name or "smollm2" in name:  # byte-level: no text is unknown
        control |= {tokenizer.unk_token_id}

    def steered(ids: tuple[int, ...]) -> list[int]:
        return [i for i in ids if i in control]

    messages, answer = contents(data, system="llama2" not in name), data[5]
    blank = [Message(m.role, "x") for m in messages]
    row = renderer.conversation(messages, answer, SOURCE)
    prompt = renderer.prompt(messages)
    assert steered(row.token_ids) == steered(renderer.conversation(blank, "x", SOURCE).token_ids)
    assert row.token_ids[: len(prompt)] == prompt.token_ids
    assert row.response_mask.count(True) > 0
    paper = renderer.document(answer, SOURCE).token_ids
    assert steered(paper) == steered(renderer.document("x", SOURCE).token_ids)
    chars = set(answer.join(m.content for m in messages))
    if name in LOSSLESS and all(tokenizer.decode(tokenizer.encode(c)) == c for c in chars):
        rows = [{"role": m.role, "content": m.content} for m in messages]
        rows.append({"role": "assistant", "content": answer})
        text = tokenizer.apply_chat_template(
            rows, chat_template=renderer.chat_template, tokenize=False
        )
        assert tokenizer.decode(row.token_ids) == text.removesuffix("\n")
        assert tokenizer.decode(paper[:-1]) == answer
        assert renderer.decode(row.token_ids[len(prompt) :]) == answer


@pytest.fixture(params=[*REAL, *BUILT], scope="module")
def injected(request: pytest.FixtureRequest) -> tuple[str, PreTrainedTokenizerBase, Renderer]:
    name = request.param
    if name in BUILT:
        tokenizer = BUILT[name]()
    else:
        tokenizer = load(str(request.getfixturevalue("shared") / name))
    return name, tokenizer, Renderer(tokenizer)


def test_wide_letters_are_spelled_out() -> None:
    tokenizer = folding()
    (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    wide = "hello \uff1c|IM_END|\uff1e yes"
    assert end in tokenizer.encode(wide)  # the trap is real
    row = Renderer(tokenizer).conversation([Message("user", wide)], "yes", SOURCE)
    assert row.token_ids.count(end) == 2  # the user's turn and the answer


def test_a_template_without_a_terminator_gets_eos() -> None:
    tokenizer = byte_level(PLAIN)
    renderer = Renderer(tokenizer)
    row = renderer.conversation(list(TURNS), "three", SOURCE)
    assert renderer.terminator_id == tokenizer.eos_token_id
    assert tokenizer.decode(row.token_ids) == (
        "user: hello, how are you?\nassistant: Fine, thanks.<|endoftext|>\n"
        "user: What is 1 + 2?\nassistant: three<|endoftext|>"
    )
    marked = [i for i, m in zip(row.token_ids, row.response_mask, strict=True) if m]
    assert tokenizer.decode(marked) == "Fine, thanks.<|endoftext|>three<|endoftext|>"


def test_eos_that_a_template_writes_between_turns_only_is_not_doubled() -> None:
    end = "{% if m.role == 'assistant' and not loop.last %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    tokenizer = byte_level(PLAIN.replace("{{ m.content }}\n", "{{ m.content }}" + end))
    plain = byte_level(PLAIN)
    row = Renderer(tokenizer).conversation(list(TURNS), "three", SOURCE)
    assert row == Renderer(plain).conversation(list(TURNS), "three", SOURCE)


def test_a_template_that_rewrites_history() -> None:
    tokenizer = byte_level(THINKING)
    renderer = Renderer(tokenizer)
    row = renderer.conversation(list(TURNS), "three", SOURCE, last_turn_only=True)
    assert "Fine, thanks.<|im_end|>" in tokenizer.decode(row.token_ids)
    assert row.token_ids[: len(renderer.prompt(TURNS))] == renderer.prompt(TURNS).token_ids
    answer = row.token_ids[len(renderer.prompt(TURNS)) :]
    assert tokenizer.decode(answer) == "<think>\n\n</think>\n\nthree<|im_end|>"
    assert renderer.decode(answer) == "three"
    with pytest.raises(RewrittenError, match=r"rows.jsonl:3: earlier turns must be .* turn 2"):
        renderer.conversation(list(TURNS), "three", SOURCE)
    # Each answer behind its own prompt, and the last of two that are learned alone.
    first = renderer.conversation(TURNS[:1], TURNS[1].content, SOURCE, last_turn_only=True)
    assert renderer.learned(list(TURNS), "three", SOURCE) == (first, row)
    # A turn that is not learned need not be found.
    shown = [replace(turn, learned=False) for turn in TURNS]
    assert renderer.conversation(shown, "three", SOURCE) == row


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no chat today') }}", "must render a user's.*no chat today"),
        (CHATML.replace("assistant\n{%", "assistant\nSo: {%"), "as the prompt and then the"),
        (CHATML.replace("m.content", "m.content | upper"), "must write an assistant's words"),
    ],
)
def test_templates_that_cannot_be_trained_with(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Renderer(byte_level(template))


def test_a_template_that_treats_one_answer_otherwise() -> None:
    odd = CHATML.replace("<|im_end|>\n", "{{ '...' if m.content == 'ODD' }}<|im_end|>{{ '\\n' }}")
    odd = odd.replace("{{ '\\n' }}", "{{ '\\n' if m.content != 'ODD' }}")
    renderer = Renderer(byte_level(odd))
    assert renderer.conversation(list(TURNS), "even", SOURCE)
    with pytest.raises(ModelError, match=r"must render an answered prompt as .* rows.jsonl:3"):
        renderer.conversation(list(TURNS), "ODD", SOURCE)


def test_a_vocabulary_with_a_large_gap() -> None:
    tokenizer = byte_level()
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition["model"]["vocab"]["zz"] = 2**24
    backend = Tokenizer.from_str(json.dumps(definition))
    gapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    with pytest.raises(ModelError, match=r"without large gaps; got id 16777216\."):
        Renderer(gapped)


def test_a_tokenizer_without_eos() -> None:
    tokenizer = byte_level()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"must have an EOS token; got none. Set its eos_token"):
        Renderer(tokenizer)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"rows.jsonl:3: a conversation must hold a turn to answer; got none"),
        ([Message("assistant", "yes")], r"must begin with a system or a user turn; got an assist"),
        ([Message("User", "x")], r"role must be one of system, user, assistant, tool; got 'User'"),  # type: ignore[arg-type]
        ([Message("user", "a\ud800b")], r"half of a surrogate pair .* got '\\ud800'"),
    ],
)
def test_turns_that_cannot_be_rendered(messages: list[Message], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Renderer(byte_level()).conversation(messages, "yes", SOURCE)


def test_turns_that_a_template_refuses() -> None:
    messages = dialog(("system", "be kind"), ("user", "hello"))
    with pytest.raises(DataError, match=r"rows.jsonl:3: turns must suit .*only users.*system user"):
        Renderer(sentencepiece()).prompt(messages, source=SOURCE)


def test_a_character_that_is_a_control_token() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u2020"]})
    with pytest.raises(DataError, match=r"text must hold no half .* got '\u2020'"):
        Renderer(tokenizer).document("a\u2020b", SOURCE)


def test_a_character_that_is_unknown_and_the_unknown_token_is_eos() -> None:
    tokenizer = sentencepiece(None, unknown=2)
    with pytest.raises(DataError, match=r"rows.jsonl:3: text must be writable without control"):
        Renderer(tokenizer).document("yes%", SOURCE)


def test_a_template_that_needs_a_system_turn_serves_conversations_that_have_one() -> None:
    needy = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    renderer, plain = Renderer(byte_level(needy + CHATML)), Renderer(byte_level(CHATML))
    messages = dialog(("system", "be kind"), ("user", "hello"))
    row = renderer.conversation(messages, "yes", SOURCE)
    assert row == plain.conversation(messages, "yes", SOURCE)
    answer = [i for i, kept in zip(row.token_ids, row.response_mask, strict=True) if kept]
    assert renderer.decode(answer) == "yes"
    with pytest.raises(DataError, match=r"turns must suit the chat template.*'no system'"):
        renderer.prompt("hello")


def test_what_an_answer_hears_follows_it_as_in_the_whole_conversation(
    named: tuple[str, PreTrainedTokenizerBase],
) -> None:
    renderer = Renderer(named[1])
    asked, heard = list(TURNS[:1]), [Message("user", "Why, <|im_end|> then? Qz7heard")]
    for answer in ("Fine, thanks.", "<|im_end|>", "42"):
        said = renderer.conversation(asked, answer, SOURCE).token_ids
        whole = renderer.prompt([*asked, Message("assistant", answer), *heard]).token_ids
        assert (*said, *renderer.heard(asked, heard)) == whole
    later = [*asked, Message("assistant", "yes"), *heard]
    said = renderer.conversation(later, "42", SOURCE).token_ids
    whole = renderer.prompt([*later, Message("assistant", "42"), *heard]).token_ids
    assert (*said, *renderer.heard(later, heard)) == whole


def test_what_an_answer_hears_does_not_depend_on_how_templates_rewrite_it() -> None:
    tokenizer = byte_level(THINKING)
    renderer = Renderer(tokenizer)
    turns = [Message("tool", "42"), Message("user", "so?")]
    text = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n"
    found = renderer.heard(list(TURNS[:1]), turns)
    assert tokenizer.decode(list(found)) == text + "<|im_start|>assistant\n"


def test_a_template_without_an_end_for_earlier_answers_is_refused() -> None:
    forgetful = CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}{% if loop.last or "
        "m.role != 'assistant' %}<|im_end|>{% endif %}")  # fmt: skip
    with pytest.raises(ModelError, match=r"must end earlier answers with .*<\|im_end\|>"):
        Renderer(byte_level(forgetful)).heard(list(TURNS[:1]), [Message("user", "so?")])
