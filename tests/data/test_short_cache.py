"""Caches of texts keep short ones alone."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable

import pytest

from tandem.data.render import IN_MEMORY, Renderer
from tandem.data.short_cache import MOST_LETTERS, short_cache
from tandem.message import Message
from tests.tiny import tiny_tokenizer

LONG = 140_000


def test_calls_with_few_letters_are_made_once() -> None:
    made: list[object] = []

    @short_cache(2)
    def size(*args: object) -> int:
        made.append(args)
        return len(made)

    turn = Message("user", "a", thoughts="b" * (MOST_LETTERS - 1))
    assert [size("a", (turn,)), size("a", (turn,))] == [1, 2]  # a letter too many
    assert [size("", (turn,)), size("", (turn,))] == [3, 3]
    assert [size(1), size(2), size(1), size(3), size(2)] == [4, 5, 4, 6, 7]


def of_turns(renderer: Renderer, number: int) -> None:
    turns = [Message("user", f"{number} {'word ' * (LONG // 5)}")]
    assert renderer.fewest_tokens(turns) >= 0
    assert renderer.conversation(turns, "Yes.", IN_MEMORY, True).token_ids


def of_tools(renderer: Renderer, number: int) -> None:
    words = f"{number} {'word ' * (LONG // 5)}"
    tools = [{"type": "function", "function": {"name": "f", "description": words}}]
    assert renderer.prompt("Hi", tools=json.dumps(tools)).token_ids


def of_calls(renderer: Renderer, number: int) -> None:
    function = {"name": "f", "arguments": {"a": f"{number} {'word ' * (LONG // 5)}"}}
    calls = json.dumps([{"type": "function", "function": function}])
    turns = [Message("user", "Hi"), Message("assistant", "", tool_calls=calls)]
    assert renderer.prompt([*turns, Message("tool", "Yes.")]).token_ids


@pytest.mark.parametrize("render", [of_turns, of_tools, of_calls])
def test_a_renderer_keeps_no_long_text_but_the_last(
    render: Callable[[Renderer, int], None],
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None  # which shows no tools
    renderer = Renderer(tokenizer)
    tracemalloc.start()
    try:
        held = []
        for number in range(3):
            render(renderer, number)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] - held[0] < LONG
