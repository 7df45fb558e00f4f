"""Generation marks in published chat templates, against the renderer's mask of what is learned."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.data.chat.marked_template import marked, rendering
from tandem.data.render import IN_MEMORY, Renderer
from tandem.types import Message
from tests.tiny import tiny_tokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN2 = (
    "{%- for message in messages %}\n"
    '    {%- if (message.role == "user") or (message.role == "system") or '
    '(message.role == "assistant" and not message.tool_calls) %}\n'
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' "
    "+ '\\n' }}\n"
    '    {%- elif message.role == "assistant" %}\n'
    "        {{- '<|im_start|>' + message.role }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)
GEMMA = (
    "{% for message in messages %}{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|im_start|>' + message['role'] + '\\n\\n'+ "
    "message['content'] | trim + '<|im_end|>' %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
TURNS = (
    Message("user", "Hi there"),
    Message("assistant", "Hello + 'you'"),
    Message("user", "Name a color"),
    Message("assistant", "Blue }} it is"),
)


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [SMOLLM2, QWEN2, ZEPHYR, GEMMA])
def test_marks_are_where_the_renderer_learns(template: str) -> None:
    tokenizer = tokenizer_with(template)
    renderer = Renderer(tokenizer)
    assert "{% generation %}" not in template
    found = renderer.chat_template
    assert "{% generation %}" in found
    rows = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    for turns in (rows[:2], rows):
        for begins in (True, False):
            shown = turns[:-1] if begins else turns
            before, after = (
                tokenizer.apply_chat_template(
                    shown, chat_template=each, tokenize=False, add_generation_prompt=begins
                )
                for each in (template, found)
            )
            assert before == after
        told = tokenizer.apply_chat_template(
            turns, chat_template=found, return_dict=True, return_assistant_tokens_mask=True
        )
        learned = [
            token
            for token, mine in zip(told["input_ids"], told["assistant_masks"], strict=True)
            if mine
        ]
        messages = [Message(turn["role"], turn["content"]) for turn in turns]
        row = renderer.conversation(messages[:-1], messages[-1].content, IN_MEMORY)
        ours = [t for t, mine in zip(row.token_ids, row.response_mask, strict=True) if mine]
        assert tokenizer.decode(learned) == tokenizer.decode(ours)
        assert tokenizer.decode(learned).count(renderer._template.terminator) == len(turns) // 2


def test_what_cannot_be_marked_stays_as_it_is() -> None:
    already = SMOLLM2.replace("message['content']", "''").replace(
        "{% endfor %}", "{% generation %}{{ message['content'] }}{% endgeneration %}{% endfor %}"
    )
    for template in (LLAMA3, already):
        tokenizer = tokenizer_with(template)
        same = marked(template, "<|im_end|>", tokenizer.eos_token, rendering(tokenizer))
        assert same == template
    # Its text depends on what no expression shows: the marks would enclose other words.
    odd = SMOLLM2.replace("message['content'] +", "message['content'].upper() +")
    assert marked(odd, "<|im_end|>", "</s>", rendering(tokenizer_with(odd))) == odd


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("{% macro turn(message) %}", "{% endmacro %}{{ turn(message) }}"),
        ("{% set turn %}", "{% endset %}{{ turn }}"),
        ("{% filter replace('zzz', '') %}", "{% endfilter %}"),
    ],
)
def test_no_marks_where_hugging_face_would_find_other_words(begin: str, end: str) -> None:
    """It takes a mark's place from what was written before, and this is written later."""
    turn = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    rest = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    template = f"{{% for message in messages %}}{turn}{{% endfor %}}{rest}"
    assert Renderer(tokenizer_with(template)).chat_template != template
    handed_on = template.replace(turn, f"{begin}{turn}{end}")
    assert Renderer(tokenizer_with(handed_on)).chat_template == handed_on


def test_a_condition_over_a_whole_turn_is_left_alone() -> None:
    """It would be cut off with the turn's end, and an empty answer be written after all."""
    template = SMOLLM2.replace("'\\n'}}", "'\\n' if message['content'] else ''}}")
    assert template != SMOLLM2
    assert Renderer(tokenizer_with(template)).chat_template == template


def test_turns_joined_by_tildes_may_be_other_than_text() -> None:
    template = SMOLLM2.replace(" + ", " ~ ")
    tokenizer = tokenizer_with(template)
    found = Renderer(tokenizer).chat_template
    assert "{% generation %}" in found
    call = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    before, after = (
        tokenizer.apply_chat_template(call, chat_template=each, tokenize=False)
        for each in (template, found)
    )
    assert before == after


def test_a_marked_template_is_the_same_tokens_to_the_engine() -> None:
    """A reward model saved with marks still shares the critic's tokens with an unmarked policy."""
    plain = Renderer(tokenizer_with(SMOLLM2))
    saved = Renderer(tokenizer_with(plain.chat_template))
    assert saved.chat_template == plain.chat_template
    assert plain.renders_like(saved)
    assert saved.renders_like(plain)
    other = Renderer(tokenizer_with(SMOLLM2.replace("You are helpful", "You are kind")))
    assert not other.renders_like(plain)
    rows = [r.conversation(TURNS[:-1], TURNS[-1].content, IN_MEMORY) for r in (plain, saved)]
    assert rows[0] == rows[1]
