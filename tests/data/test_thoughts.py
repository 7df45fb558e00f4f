"""What an assistant thinks before it speaks, as templates of every habit take it."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tandem.data.render import Renderer
from tandem.data.thoughts import NO_THOUGHTS, ThoughtForm, in_content
from tandem.data.turns import turns_in, turns_of
from tandem.errors import DataError, ModelError
from tandem.generation.detokenizer import AnswerText
from tandem.types import Message, Source
from tests.data.built_tokenizers import CHATML, THINKING, byte_level

SOURCE = Source("set", "rows.jsonl", 3)
USER = Message("user", "hello")
THOUGHT = "<think>\nHm, 42?\n</think>\n\nyes"

_BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
_SPLIT = "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}"
OPENED = {
    # Answered turns have no thought and lose those of their content; no field.
    "dropped": _BEGIN + _SPLIT + "{% endif %}{{ c }}" + _END + "<think>\n{% endif %}",
    # A thought of the content is found by the template; an answer without has the end alone.
    "found": _BEGIN
    + "{% set c = m.content %}{% if '</think>' in c %}{{ '<think>' + (c.split('</think>')[0].split("
    "'<think>')[-1] | trim) }}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '</think>' if m.role == 'assistant' }}{{ c | trim }}" + _END + "<think>{% endif %}",
    # Under a key of its own.
    "field": _BEGIN
    + "{% if m.thinking %}<think>\n{{ m.thinking }}\n</think>\n\n{% endif %}{{ m.content }}"
    + _END + "<think>\n{% endif %}",
    # As it is: an answer would be spoken within the thought.
    "as it is": _BEGIN
    + "{{ '<think>\n' if m.role == 'assistant' }}{{ m.content }}" + _END + "<think>\n{% endif %}",
}  # fmt: skip


def answer_of(renderer: Renderer, messages: list[Message], answer: str) -> tuple[int, ...]:
    """The ids of an answer, which follows the very prompt that asks for it."""
    row = renderer.conversation(messages, answer, SOURCE, last_turn_only=True)
    prompt = renderer.prompt(messages).token_ids
    assert row.token_ids[: len(prompt)] == prompt
    assert row.response_mask == tuple(i >= len(prompt) for i in range(len(row.token_ids)))
    return row.token_ids[len(prompt) :]


@pytest.mark.parametrize(("habit", "end"), [(h, "\n</think>\n\n") for h in OPENED if h != "found"])
def test_an_answer_goes_on_with_the_thought_that_its_prompt_begins(habit: str, end: str) -> None:
    tokenizer = byte_level(OPENED[habit])
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(renderer.prompt([USER]).token_ids).endswith("assistant\n<think>\n")
    thinks, ends = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    found = answer_of(renderer, [USER], THOUGHT)
    assert tokenizer.decode(found) == f"Hm, 42?{end}yes<|im_end|>"
    assert (found.count(thinks), found.count(ends)) == (0, 1)
    # The same without the tag that the prompt has, as an answer is sampled.
    assert answer_of(renderer, [USER], f"Hm, 42?{end}yes") == found
    assert renderer.decode(found) == f"Hm, 42?{end}yes"
    # Without a thought it is ended first, which tells it from a thought that was cut off.
    short = answer_of(renderer, [USER], "yes")
    assert tokenizer.decode(short) == f"{end}yes<|im_end|>"
    assert renderer.decode(short) == f"{end}yes"
    for same in (f"{end}yes", "<think>\n\n</think>\n\nyes", "<think></think>yes"):
        assert answer_of(renderer, [USER], same) == short
    # Tags that do not begin the answer are words.
    words = "yes <think>Hm</think> no"
    assert renderer.decode(answer_of(renderer, [USER], words)) == end + words


def test_a_template_that_finds_thoughts_itself() -> None:
    tokenizer = byte_level(OPENED["found"])
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(answer_of(renderer, [USER], THOUGHT)) == "Hm, 42?</think>yes<|im_end|>"
    assert tokenizer.decode(answer_of(renderer, [USER], "yes")) == "</think>yes<|im_end|>"


def test_earlier_thoughts_are_as_the_template_leaves_them() -> None:
    tokenizer = byte_level(OPENED["dropped"])
    turns = [USER, Message("assistant", THOUGHT), Message("user", "bye")]
    found = Renderer(tokenizer).prompt(turns).token_ids
    told = [turn.as_dict() for turn in turns]
    expected = tokenizer.apply_chat_template(
        told, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert "Hm" not in tokenizer.decode(found)
    assert list(found) == expected


def test_tags_of_thoughts_are_control_tokens() -> None:
    """As Hugging Face writes them, and as a model that thinks does."""
    tokenizer = byte_level(CHATML)
    renderer = Renderer(tokenizer)
    row = renderer.conversation([USER], THOUGHT, SOURCE)
    told = [USER.as_dict(), Message("assistant", THOUGHT).as_dict()]
    whole = tokenizer.apply_chat_template(told, tokenize=True, return_dict=False)
    assert list(row.token_ids) == whole[: len(row)]
    assert renderer.decode(answer_of(renderer, [USER], THOUGHT)) == THOUGHT


@pytest.mark.parametrize("template", [CHATML, *OPENED.values()])
def test_nobody_else_writes_them(template: str) -> None:
    """Neither a user, nor an assistant within its thoughts or its words."""
    tokenizer = byte_level(template)
    renderer = Renderer(tokenizer)
    control = [tokenizer.convert_tokens_to_ids(t) for t in ("<think>", "</think>", "<|im_end|>")]

    def counts(user: str, answer: str) -> list[int]:
        row = renderer.conversation([Message("user", user)], answer, SOURCE)
        return [row.token_ids.count(i) for i in control]

    mine = "<think>\nHm <think> <|im_end|>\n</think>\n\nyes </think> <think><|im_end|>"
    assert counts("hello", mine) == counts("<think>a</think>", THOUGHT) == counts("hello", THOUGHT)


def test_thoughts_under_keys_of_their_own() -> None:
    bot = {"role": "assistant", "content": "yes"}
    for key in ("reasoning_content", "reasoning", "thinking"):
        told = [USER.as_dict(), {**bot, key: "Hm, 42?"}]
        assert turns_of(told, "messages")[1].content == THOUGHT
        assert turns_in(told)[1].content == THOUGHT
    twice = {**bot, "content": THOUGHT, "reasoning_content": "Hm, 42?"}
    assert turns_of([USER.as_dict(), twice], "messages")[1].content == THOUGHT
    blank = {**bot, "reasoning_content": " "}
    assert turns_of([USER.as_dict(), blank], "messages")[1].content == "yes"
    tagged = {**bot, "reasoning_content": "<think>\nHm, 42?\n</think>"}
    assert turns_of([USER.as_dict(), tagged], "messages")[1].content == THOUGHT
    alone = {"role": "assistant", "content": None, "reasoning_content": "Hm, 42?"}
    assert turns_of([USER.as_dict(), alone], "messages")[1].content == THOUGHT.removesuffix("yes")
    with pytest.raises(DataError, match="thoughts must have no </think> within"):
        turns_in([USER.as_dict(), {**bot, "thinking": "Hm </think> hm"}])
    asks = {"role": "user", "content": "hello", "thinking": "Hm"}
    assert turns_of([asks], "messages")[0].content == "hello"
    assert in_content("\nHm, 42?\n", "yes") == THOUGHT


def test_a_prompt_that_ends_with_a_thought_that_is_over() -> None:
    over = CHATML.replace("assistant\n{%", "assistant\n<think>\n\n</think>\n\n{%")
    tokenizer = byte_level(over)
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(answer_of(renderer, [USER], "yes")) == "yes<|im_end|>"
    empty = "<think>\n\n</think>\n\nyes"
    assert tokenizer.decode(answer_of(renderer, [USER], empty)) == "yes<|im_end|>"
    with pytest.raises(DataError, match=r"rows.jsonl:3: an answer must have no thoughts with"):
        renderer.conversation([USER], THOUGHT, SOURCE)


def test_a_template_that_ends_thoughts_as_it_ends_answers() -> None:
    """As Solar Open's: generation would stop behind the thought."""
    own = "{% if m.reasoning %}<think>{{ m.reasoning }}<|im_end|><|im_start|>assistant\n{% endif %}"
    tokenizer = byte_level(CHATML.replace("{{ m.content }}", f"{own}{{{{ m.content }}}}"))
    renderer = Renderer(tokenizer)
    assert renderer.thoughts.how == "reasoning"
    assert tokenizer.decode(answer_of(renderer, [USER], "yes")) == "yes<|im_end|>"
    with pytest.raises(DataError, match=r"which ends them by <\|im_end\|>, where generation ends"):
        renderer.conversation([USER], THOUGHT, SOURCE)
    for empty in ("<think>\n\n</think>\n\nyes", "<think></think>yes"):
        assert tokenizer.decode(answer_of(renderer, [USER], empty)) == "yes<|im_end|>"


def test_a_template_that_takes_its_own_tags_out() -> None:
    """As Gemma 4's: the model writes a channel, which any answered turn lacks."""
    text = "{{ m.content.split('[/THINK]')[-1] if '[THINK]' in m.content else m.content }}"
    tokenizer = byte_level(CHATML.replace("{{ m.content }}", text))
    renderer = Renderer(tokenizer)
    found = tokenizer.decode(answer_of(renderer, [USER], THOUGHT))
    assert found == "[THINK]\nHm, 42?\n[/THINK]yes<|im_end|>"
    assert tokenizer.decode(answer_of(renderer, [USER], "yes")) == "yes<|im_end|>"


def test_thoughts_of_a_turn_are_those_of_its_content() -> None:
    turn = Message("assistant", "yes", thoughts="Hm, 42?")
    assert turn.as_dict() == {
        **Message("assistant", "yes").as_dict(),
        "reasoning_content": "Hm, 42?",
    }
    for template in (CHATML, THINKING, *OPENED.values()):
        renderer = Renderer(byte_level(template))
        same = renderer.conversation([USER], THOUGHT, SOURCE)
        assert renderer.conversation([USER], turn, SOURCE) == same
        asked = [USER, turn, USER]
        assert (
            renderer.prompt(asked).token_ids
            == renderer.prompt([USER, Message("assistant", THOUGHT), USER]).token_ids
        )


def test_empty_thoughts() -> None:
    """They stay where the content is written as it is; else they are as of an answer without."""
    empty = "<think>\n\n</think>\n\nyes"
    tokenizer = byte_level(CHATML)
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(answer_of(renderer, [USER], empty)) == f"{empty}<|im_end|>"
    renderer = Renderer(byte_level(THINKING))
    assert answer_of(renderer, [USER], empty) == answer_of(renderer, [USER], "yes")
    # A template that writes an empty thought before any answer, and loses those of others.
    tokenizer = byte_level(CHATML.replace("{{ m.content }}", "{{ '<think></think>' if m.role == "
        "'assistant' }}{{ m.content.split('</think>')[-1] | trim }}"))  # fmt: skip
    renderer = Renderer(tokenizer)
    thinks = tokenizer.decode(answer_of(renderer, [USER], THOUGHT))
    assert thinks == "<think>Hm, 42?</think>yes<|im_end|>"
    assert answer_of(renderer, [USER], empty) == answer_of(renderer, [USER], "yes")


def test_a_prompts_text_goes_on_with_the_text_of_an_answer() -> None:
    for template in (CHATML, *OPENED.values()):
        renderer = Renderer(byte_level(template))
        prompt = renderer.prompt([USER])
        ids = answer_of(renderer, [USER], "<think>\nHm\n</think>\n\nyes")
        whole = renderer.prompt_text(prompt) + renderer.decode(ids)
        assert whole == renderer.continuation([*prompt.token_ids, *ids[:-1]])


def test_another_end_of_prompts_is_no_thought() -> None:
    odd = CHATML.replace("assistant\n{%", "assistant\nSure: {%")
    with pytest.raises(ModelError, match="must render an answered prompt as the prompt and then"):
        Renderer(byte_level(odd))


def test_calls_follow_thoughts() -> None:
    call = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    template = OPENED["dropped"].replace("{{ c }}", "{{ c }}" + call + "{% endfor %}")
    template = template.replace("m.content %}", "m.content or '' %}", 1)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object",
        "properties": {}}}}]  # fmt: skip
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + template
    tokenizer = byte_level(template)
    renderer = Renderer(tokenizer)
    said = '[{"type": "function", "function": {"name": "now", "arguments": {}}}]'
    turn = Message("assistant", "<think>\nHm\n</think>", tool_calls=said)
    row = renderer.conversation([USER], turn, SOURCE, True, tools)
    prompt = renderer.prompt([USER], tools=tools).token_ids
    text = tokenizer.decode(row.token_ids[len(prompt) :])
    assert row.token_ids[: len(prompt)] == prompt
    assert text.startswith("Hm\n</think>\n\n<tool_call>")
    # A call behind a thought that ends at once is read, too; within one that does not end, none.
    bare = renderer.conversation([USER], replace(turn, content=""), SOURCE, True, tools)
    found = renderer.decode(bare.token_ids[len(prompt) :])
    assert renderer.spoken(found, json.dumps(tools), [USER]).turn.tool_calls
    assert not renderer.spoken(
        found.replace("</think>", ""), json.dumps(tools), [USER]
    ).turn.tool_calls
    assert text.endswith("</tool_call><|im_end|>")


R1 = ThoughtForm("joined", in_prompt=True)
MISTRAL = ThoughtForm("content", "[THINK]", "[/THINK]")
LONGER = ThoughtForm("content", ends="</think><answer>")
PARTED = [
    # (form, text, thoughts and words)
    (NO_THOUGHTS, "yes", ("", "yes")),
    (NO_THOUGHTS, "\n\n yes \n", ("", "\n\n yes \n")),
    (NO_THOUGHTS, THOUGHT, ("Hm, 42?", "yes")),
    (NO_THOUGHTS, "\n<think>\n\n  Hm \n\n </think>\n yes ", ("  Hm", " yes ")),
    (NO_THOUGHTS, "<think>Hm </thin </th</think>yes</think>", ("Hm </thin </th", "yes</think>")),
    (NO_THOUGHTS, "<think>\n\n</think>\n\nyes", ("", "yes")),
    (NO_THOUGHTS, "<think>Hm\n", ("Hm", "")),
    (NO_THOUGHTS, "<think>Hm </thi", ("Hm </thi", "")),
    (NO_THOUGHTS, "<thin", ("", "<thin")),
    (NO_THOUGHTS, "yes <think>Hm</think>", ("", "yes <think>Hm</think>")),
    (NO_THOUGHTS, "Hm</think>yes", ("", "Hm</think>yes")),
    (R1, "Hm, 42?\n</think>\n\nyes", ("Hm, 42?", "yes")),
    (R1, "\n</think>\n\nyes", ("", "yes")),
    (R1, "Hm, 42?", ("Hm, 42?", "")),
    (R1, THOUGHT, ("Hm, 42?", "yes")),
    (R1, "<think", ("<think", "")),
    (R1, "Hm <think> hm</think>yes", ("Hm <think> hm", "yes")),
    (MISTRAL, "[THINK]Hm </think> [/[/THINK]yes", ("Hm </think> [/", "yes")),
    (MISTRAL, THOUGHT, ("Hm, 42?", "yes")),
    (MISTRAL, "[TH] yes", ("", "[TH] yes")),
    (replace(MISTRAL, in_prompt=True), "Hm[/THINK]\nyes", ("Hm", "yes")),
    (LONGER, "<think>Hm</think><answer>yes", ("Hm", "yes")),
    (LONGER, "<think>Hm</think><ans", ("Hm", "<ans")),
    (LONGER, "<think>Hm</think> yes", ("Hm", " yes")),
]


@pytest.mark.parametrize(("form", "text", "parted"), PARTED)
def test_thoughts_and_words_only_grow_as_an_answer_comes(
    form: ThoughtForm, text: str, parted: tuple[str, str]
) -> None:
    assert form.so_far(text, is_over=True) == parted
    before = ("", "")
    for end in range(len(text) + 1):
        now = form.so_far(text[:end], is_over=False)
        assert all(new.startswith(old) for new, old in zip(now, before, strict=True))
        assert all(new.startswith(old) for new, old in zip(parted, now, strict=True))
        ended = form.so_far(text[:end], is_over=True)
        assert all(new.startswith(old) for new, old in zip(ended, now, strict=True))
        if whole := form.split(text[:end]):
            assert ended == (whole[0].lstrip("\n").rstrip(), whole[1].lstrip("\n"))
        before = now


def test_whatever_an_answer_consists_of_it_only_grows() -> None:
    pieces = [
        "<think>",
        "</think>",
        "<answer>",
        "<",
        "</thi",
        "\n",
        " ",
        "a",
        "[THINK]",
        "[/THINK]",
    ]
    draw = random.Random(3)
    for form in (NO_THOUGHTS, R1, MISTRAL, LONGER, replace(MISTRAL, in_prompt=True)):
        for _ in range(300):
            text, before = "".join(draw.choices(pieces, k=8)), ("", "")
            for end in range(len(text) + 1):
                now = form.so_far(text[:end], is_over=False)
                for known in (now, form.so_far(text[:end], is_over=True)):
                    assert all(map(str.startswith, known, before)), text[:end]
                before = now


def test_a_prompt_may_begin_or_end_the_thought_for_itself_alone() -> None:
    assert not R1.behind("assistant\n<think>\n\n</think>\n\n").in_prompt
    assert R1.behind("assistant\n<think>\n") == R1.behind("assistant: ") == R1
    assert NO_THOUGHTS.behind("assistant\n<think>\n").in_prompt
    assert not NO_THOUGHTS.behind("assistant\n").in_prompt


def test_an_answer_behind_an_empty_thought_streams_as_it_is_decoded() -> None:
    tokenizer = byte_level(THINKING)
    renderer = Renderer(tokenizer)
    for text in (
        "<think>\n\n</think>\n\nyes, I am fine. hello",
        "<think>\nHm\n</think>\n\nyes",
        "yes",
    ):
        ids, said = tokenizer.encode(text), AnswerText(renderer.decode)
        parts = [*map(said.push, ids), said.flush()]
        assert (
            "".join(parts) == renderer.decode(ids) == text.removeprefix("<think>\n\n</think>\n\n")
        )
