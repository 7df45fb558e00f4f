"""Where the assistant's words lie in a rendered conversation."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.data.control import ControlTokens
from tandem.data.render import Renderer
from tandem.data.template import ChatTemplate
from tandem.errors import DataError, ModelError
from tandem.types import Message, Source
from tests.data.built_tokenizers import CHATML, LLAMA2, PLAIN, THINKING, byte_level, sentencepiece

TURNS = [Message("user", "hello"), Message("assistant", " yes "), Message("user", "bye")]


def template_of(tokenizer: PreTrainedTokenizerBase, prefix: str = "") -> ChatTemplate:
    return ChatTemplate(tokenizer, ControlTokens(tokenizer), prefix)


@pytest.mark.parametrize(
    ("template", "frame"),
    [
        (CHATML, ("", "", "<|im_end|>")),
        (PLAIN, ("", "", "")),
        (THINKING, ("<think>\n\n</think>\n\n", "", "<|im_end|>")),
        (None, (" ", "", "<|endoftext|>")),
    ],
)
def test_what_surrounds_the_assistants_words(
    template: str | None, frame: tuple[str, str, str]
) -> None:
    found = template_of(byte_level(template))
    assert (found.lead, found.trail, found.terminator) == frame


def test_white_space_before_the_terminator_is_the_answers() -> None:
    found = template_of(sentencepiece(LLAMA2))
    assert (found.lead, found.trail, found.terminator) == (" ", " ", "</s>")


def test_parts_lie_end_to_end() -> None:
    template = template_of(byte_level())
    parts = template.parts(TURNS, "row", every_answer=True)
    assert [(part.text, part.answer) for part in parts] == [
        ("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", False),
        (" yes ", True),
        ("\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n", False),
    ]
    text = template.prompt(TURNS, "row")
    assert text == "".join(p.text + template.terminator * p.answer for p in parts)
    assert [text.startswith(part.before + part.text) for part in parts] == [True] * 3
    last = template.answer([*TURNS, Message("assistant", "so")], text, "row")
    assert (last.text, last.answer, last.before) == ("so", True, text)


def test_a_template_that_needs_a_system_turn_serves_rows_that_have_one() -> None:
    needy = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = template_of(byte_level(needy + CHATML))
    assert template.terminator == "<|im_end|>"
    system = Message("system", "be kind")
    assert template.prompt([system, *TURNS[:1]], "row").endswith("assistant\n")
    assert len(template.parts([system, *TURNS], "row", every_answer=True)) == 3
    with pytest.raises(DataError, match=r"row: turns must suit the chat template.*'no system'"):
        template.prompt(TURNS[:1], "row")
    with pytest.raises(ModelError, match="must render a user's and an assistant's turn; got 'so'"):
        template_of(byte_level("{{ raise_exception('so') }}"))


def test_the_default_marks_what_the_assistant_wrote_for_other_trainers() -> None:
    tokenizer = byte_level(None)
    tokenizer.chat_template = template_of(tokenizer).source
    dialog = [{"role": m.role, "content": m.content} for m in TURNS]
    marked = tokenizer.apply_chat_template(
        dialog, return_assistant_tokens_mask=True, return_dict=True
    )
    written = [i for i, m in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(written).strip() == "yes <|endoftext|>"
    told = [{"role": "developer", "content": "be kind"}, *dialog[:1]]
    text = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    assert text == "be kind\n\nHuman: hello\n\nAssistant:"


def test_the_default_begins_as_the_tokenizer_does() -> None:
    template = template_of(byte_level(None), prefix='<"s">')
    assert template.prompt(TURNS[:1], "row") == '<"s">Human: hello\n\nAssistant:'


def test_named_templates_give_their_default() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": CHATML, "tool_use": PLAIN}
    assert template_of(tokenizer).source == CHATML


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{% for i in range(1000000) %}{% endfor %}", "OverflowError"),
        ("{{ 'a' * 5000000 }}", "5000000 characters where"),
    ],
)
def test_a_template_is_a_program_that_can_fail(template: str, found: str) -> None:
    with pytest.raises(ModelError, match="must render a user's and an assistant's turn") as error:
        Renderer(byte_level(template))
    assert found in str(error.value)
    assert str(error.value).isprintable()


def test_a_template_that_fails_on_one_row_fails_for_that_row() -> None:
    only_short = "{{ 1 / (messages[0].content | length - 3) }}" + PLAIN
    renderer = Renderer(byte_level(only_short))
    with pytest.raises(DataError, match=r"a:7: turns must suit .* got 'ZeroDivisionError"):
        renderer.prompt([Message("user", "abc")], {}, Source("a", "a", 7))
