"""Calls read back from answers, in the forms of the templates of many model families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.data.argument_types import argument_types, kind_of, typed
from tandem.data.chat.call_probe import reader_of
from tandem.data.chat.call_reader import Called, CallError, CallReader
from tandem.data.render import Renderer
from tandem.data.spoken import spoken
from tandem.message import Message
from tests.data.built_tokenizers import CHATML, byte_level
from tests.data.test_tool_rendering import (
    ASKED,
    CALL,
    INST,
    PYTHONIC,
    RESULT,
    TAGGED,
    TOOLS,
    built,
    hf,
    turns_of,
)

_EACH = "{% for c in calls %}"
_END = "{% endfor %}"
_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_ITEMS = "{% for k, v in c.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
FORMS = {
    "hermes": f"{_EACH}{{{{ '\n' if not loop.first }}}}<tool_call>\n{_JSON}\n</tool_call>{_END}",
    "llama": '{"name": "{{ calls[0].name }}", "parameters": {{ calls[0].arguments | tojson }}}',
    "python tag": '<|python_tag|>{"name": "{{ calls[0].name }}", "parameters": '
    "{{ calls[0].arguments | tojson }}}<|eom_id|>",
    "list": f"[TOOL_CALLS] [{_EACH}{_JSON}{{{{ ', ' if not loop.last }}}}{_END}]",
    "openai": "<calls>{{ wrapped | tojson }}</calls>",
    "arguments as text": "<calls>{{ as_text | tojson }}</calls>",
    "other keys": f'<|ACTION|>[{_EACH}{{"tool_name": "{{{{ c.name }}}}", "parameters": '
    f"{{{{ c.arguments | tojson }}}}}}{{{{ ', ' if not loop.last }}}}{_END}]<|END_ACTION|>",
    "name and json": f"<calls>{_EACH}<call>function<sep>{{{{ c.name }}}}\n```json\n"
    f"{{{{ c.arguments | tojson }}}}\n```</call>{_END}</calls>",
    "marks of their own": f"{_EACH}[TOOL_CALLS]{{{{ c.name }}}}[ARGS]"
    f"{{{{ c.arguments | tojson }}}}{_END}",
    "one at a time": "{{ calls[1].none if calls | length > 1 }}to=functions.{{ calls[0].name }}"
    "<|channel|>json<|message|>{{ calls[0].arguments | tojson }}<|call|>",
    "tags": f"{_EACH}\n<tool_call>\n<function={{{{ c.name }}}}>\n{_ITEMS}<parameter={{{{ k }}}}>\n"
    f"{_VALUE}\n</parameter>\n{_END}</function>\n</tool_call>{_END}",
    "keys and values": f"{_EACH}\n<tool_call>{{{{ c.name }}}}\n{_ITEMS}<arg_key>{{{{ k }}}}"
    f"</arg_key>\n<arg_value>{_VALUE}</arg_value>\n{_END}</tool_call>{_END}",
}
SINGLE = {"llama", "python tag", "one at a time"}
CALLS = [
    Called("add", {"a": 2, "b": -3.5}, "call00000"),
    Called("say", {"text": 'He said "no".\n\n  Twice: 12', "loud": True}, "call00001"),
    Called("now", {}, "call00002"),
    Called("put", {"where": {"x": [1, {"y": None}]}, "text": "12"}, "call00003"),
]
TYPES = {"add": {}, "say": {"text": "string"}, "now": {}, "put": {"text": "string"}}


class Template:
    """What a template of an assistant's turn writes of calls alone."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment()
        environment.filters["tojson"] = json.dumps
        self._template = environment.from_string(source)

    def __call__(self, calls: Any) -> str:
        functions = [{"name": c.name, "arguments": c.arguments, "id": c.id} for c in calls]
        wrapped = [
            {"id": f["id"], "function": {"name": f["name"], "arguments": f["arguments"]}}
            for f in functions
        ]
        as_text = [{"name": f["name"], "arguments": json.dumps(f["arguments"])} for f in functions]
        try:
            return self._template.render(calls=functions, wrapped=wrapped, as_text=as_text)
        except Exception:
            return ""


def reader(name: str) -> tuple[CallReader, Template]:
    write = Template(FORMS[name])
    found = reader_of(write)
    assert found is not None, name
    return found, write


def bare(calls: list[Called]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", FORMS)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    found, write = reader(name)
    for call in CALLS:
        words, calls = found.read(write([call]), TYPES)
        assert (words.strip(), bare(calls)) == ("", bare([call]))
    if name not in SINGLE:
        for several in (CALLS, CALLS[::-1], [CALLS[2]] * 3):
            assert bare(found.read(write(several), TYPES)[1]) == bare(several)
    assert "add" in found.example
    assert found.read(found.example, TYPES)[1][0].name == "add"


@pytest.mark.parametrize("name", FORMS)
def test_words_are_words(name: str) -> None:
    found, write = reader(name)
    for text in ("It is 6.", "", "a {b} [c] 12", "<", '{"name": "add"}' if name != "llama" else ""):
        assert found.read(text, TYPES) == (text, [])
    if name != "llama":  # it writes nothing before a call, so that words are no call
        assert found.read("Let me see.\n" + write(CALLS[:1]), TYPES) == (
            "Let me see.",
            found.read(write(CALLS[:1]), TYPES)[1],
        )


def test_a_call_alone_is_one_where_nothing_marks_calls() -> None:
    found, write = reader("llama")
    call = write(CALLS[:1])
    assert found.read(f"\n{call} ", TYPES)[1]
    for text in (f"Here: {call}", '{"name": 3}', "[1, 2]", '{"name": "Bob", "age": 3}'):
        assert found.read(text, TYPES) == (text, [])
    assert found.read(call, {}) == (call, [])  # no such function is listed
    for text in (f"{call} and more", f"{call}; {call}"):
        with pytest.raises(CallError, match="a call must be the whole answer"):
            found.read(text, TYPES)
    with pytest.raises(CallError, match="a call must be JSON"):
        found.read(call[:-3], TYPES)


def test_arguments_under_another_name_are_no_call_without_any() -> None:
    for name in ("hermes", "llama", "openai"):
        found, write = reader(name)
        call = write(CALLS[:1])
        key = "parameters" if name == "llama" else "arguments"
        other = "arguments" if name == "llama" else "parameters"
        assert bare(found.read(call.replace(key, other), TYPES)[1]) == bare(CALLS[:1])
        with pytest.raises(CallError, match=f"arguments must be in '{key}'; got 'args'"):
            found.read(call.replace(key, "args"), TYPES)
        with pytest.raises(CallError, match="a call must be JSON"):
            found.read(call.replace(f'"{key}"', f'"{key}": {{}}, "{key}"'), TYPES)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "llama"])
def test_calls_between_words_are_all_read(name: str) -> None:
    found, write = reader(name)
    first, second = write(CALLS[:1]), write(CALLS[1:2])
    text = f"One:\n{first}\nand two: {second} done."
    if name in ("hermes", "openai", "tags", "keys and values", "name and json", "other keys"):
        words, calls = found.read(text, TYPES)
        assert bare(calls) == bare(CALLS[:2])
        assert words == "One:\nand two:\ndone."
    with_end = f"{first} {second}"
    assert bare(found.read(with_end, TYPES)[1]) == bare(CALLS[:2])


@pytest.mark.parametrize("name", [name for name in FORMS if name not in SINGLE])
def test_of_a_cut_answer_the_whole_calls_are_read(name: str) -> None:
    """Wherever it is cut: the calls are those of a shorter answer, and nothing of the next is left
    among the words."""
    found, write = reader(name)
    several, ends = write(CALLS), []
    for end in range(len(several) + 1):
        text = several[:end]
        try:
            words, calls = found.read(text, TYPES, is_cut=True)
        except CallError:  # the first call is not whole
            words, calls = text, []
        assert bare(calls) == bare(CALLS)[: len(calls)], text
        ends.append(len(calls))
        if calls:
            assert words == "", text
    assert ends == sorted(ends)
    assert set(ends) == {0, 1, 2, 3, 4}
    assert found.read(several + "\nDone.", TYPES, is_cut=True)[0] in ("Done.", "")


def test_of_a_cut_list_without_a_mark_the_whole_calls_are_read() -> None:
    found, write = reader("llama")
    call = write(CALLS[:1])
    assert bare(found.read(f"[{call}, {call[:-3]}", TYPES, is_cut=True)[1]) == bare(CALLS[:1])
    with pytest.raises(CallError, match="a call must be JSON"):
        found.read(f"[{call}, {call[:-3]}", TYPES)
    with pytest.raises(CallError, match="a call must be JSON"):
        found.read(f"[{call[:-3]}", TYPES, is_cut=True)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", "<tool_call>\nadd(2, 3)\n</tool_call>", "a call must be JSON; got 'add"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2}', "a call must be JSON"),
        ("hermes", '<tool_call>{"nam": "add"}</tool_call>', "must be an object with 'name'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [2]}</tool_call>', "be a JSON object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}} no', "must end with '</tool_c"),
        ("hermes", "<tool_call>" + "[" * 100_000, "a call must be JSON"),
        ("name and json", "<calls><call>function<sep>add(2)</call>", "after a call's name must"),
        ("name and json", "<calls><call>function<sep>a b\n```json\n{}```", "a name must be one w"),
        ("tags", "<tool_call>\n<function=add>\n2", "a call's name must be followed by"),
        ("tags", "<tool_call><function=add><parameter=a>\n2</function>", "the argument a must be"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(name: str, text: str, problem: str) -> None:
    with pytest.raises(CallError, match=problem.replace("(", r"\(")):
        reader(name)[0].read(text, {})


def test_space_may_be_other_than_the_templates_and_a_stop_may_cut_the_end() -> None:
    found, _ = reader("hermes")
    call = '{"arguments":{"a":2},  "name":"add"}'
    for text in (
        f"<tool_call>{call}</tool_call>",
        f"<tool_call>\n\n {call}",
        f"  <tool_call>{call}</tool",
        f"<tool_call>{call}</tool_call>\n\n",
    ):
        assert bare(found.read(text, {})[1]) == [("add", {"a": 2})]
    two = f"<tool_call>{call}</tool_call><tool_call>{call}</tool_call>Done."
    assert found.read(two, {}) == ("Done.", [Called("add", {"a": 2})] * 2)


def test_values_in_tags_keep_their_own_space_and_get_their_types() -> None:
    found, _ = reader("tags")
    text = (
        "<tool_call>\n<function=f>\n<parameter=code>\n    if x:\n        12\n\n</parameter>\n"
        "<parameter=n>\n12\n</parameter>\n<parameter=word>12</parameter></function></tool_call>"
    )
    expected = {"code": "    if x:\n        12\n", "n": 12, "word": "12"}
    types = {"f": {"code": "string", "n": "integer", "word": "string"}}
    assert found.read(text, types)[1] == [Called("f", expected)]


def test_other_forms_are_not_taken_for_one_of_these() -> None:
    for source in (
        "",
        "no calls",
        "{{ calls[0].name }}",
        (
            "{% for c in calls %}{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}="
            "{{ v }}, {% endfor %}){% endfor %}"
        ),
        # Its number is in the name.
        (
            "{% for c in calls %}<c>{{ c.name }}:{{ loop.index }}<a>{{ c.arguments | tojson }}"
            "{% endfor %}"
        ),
        # Python's words for true and none.
        "{% for c in calls %}<c>{{ c.name }}<a>{{ c.arguments }}</c>{% endfor %}",
    ):
        assert reader_of(Template(source)) is None, source


def test_types_of_arguments_are_those_of_the_schemas() -> None:
    assert argument_types("") == {}
    assert argument_types(json.dumps(TOOLS)) == {
        "weather_of": {"city": "string", "days": "integer"},
        "now": {},
    }
    odd = [{"type": "code"}, {"function": {"name": "f", "parameters": {"properties": {"a": {
        "type": ["string", "null"]}, "b": 3}}}}]  # fmt: skip
    assert argument_types(json.dumps(odd)) == {"f": {"a": "string?"}}
    for schema, kind in (
        ({"type": "string", "nullable": True}, "string?"),
        ({"type": ["integer", "string"]}, ""),
        ({"anyOf": [{"type": "integer"}]}, ""),
        ({"type": ["number"]}, "number"),
    ):
        assert kind_of(schema) == kind


def test_values_in_tags_may_be_null_or_pythons() -> None:
    for text, kind, value in (
        ("null", "string?", None),
        ("None", "string?", None),
        ("null", "string", "null"),
        ("True", "boolean", True),
        ("None", "", None),
        ("True", "string", "True"),
        ("12", "", 12),
        ("x", "integer", "x"),
    ):
        assert typed(text, kind) == value
    # As Qwen Coder's template writes what is no text.
    of_lists = "v is mapping or (v is sequence and v is not string)"
    pythons = FORMS["tags"].replace(_VALUE, f"{{{{ v | tojson if {of_lists} else v | string }}}}")
    found = reader_of(Template(pythons))
    assert found is not None
    written = Template(pythons)([Called("f", {"a": True, "b": None, "c": [1], "d": "x"})])
    assert found.read(written, {})[1] == [Called("f", {"a": True, "b": None, "c": [1], "d": "x"})]


@pytest.mark.parametrize("template", [TAGGED, PYTHONIC, INST, None], ids=range(4))
def test_a_conversation_with_calls_that_were_read_is_hugging_faces(template: str | None) -> None:
    """Ids: the prompt, the answer as it was written, what it heard."""
    tokenizer = built(CHATML)
    tokenizer.chat_template = template
    renderer, tools = Renderer(tokenizer), json.dumps(TOOLS)
    prompt = renderer.prompt([ASKED], tools=tools)
    answer = renderer.conversation(prompt.messages, turns_of(renderer, [ASKED, CALL])[1],
                                   prompt.source, tools=tools)  # fmt: skip
    ids = answer.token_ids[len(prompt) :]
    said = renderer.spoken(renderer.decode(ids), tools, prompt.messages)
    assert said.problem == ""
    assert json.loads(said.turn.tool_calls)[0]["function"] == CALL["tool_calls"][0]["function"]
    heard = renderer.heard(prompt.messages, turns_of(renderer, [ASKED, RESULT])[1:], tools=tools)
    dialog = [ASKED, said.turn.as_dict(), RESULT]
    if template == INST:
        dialog[1]["tool_calls"][0]["id"] = "abcdefgh1"
    else:
        assert json.loads(said.turn.tool_calls)[0]["id"] == "call00000"
    whole = [*prompt.token_ids, *ids, *heard]
    assert whole == list(renderer.prompt(dialog, tools=tools).token_ids)
    if template:
        del dialog[1]["content"]
        assert whole == hf(tokenizer, dialog, TOOLS, True)


def test_nothing_is_a_call_in_thoughts() -> None:
    renderer, tools = Renderer(built(TAGGED)), json.dumps(TOOLS)
    call = '<tool_call>{"name": "now"}</tool_call>'
    for text in (f"<think>maybe {call} hm</think>It is 4.", f"<think>maybe {call}"):
        assert renderer.spoken(text, tools, ()).turn == Message("assistant", text)
    thought = f"<think>maybe {call} hm</think>"
    found = renderer.spoken(f"{thought}\n{call}", tools, ()).turn
    assert found.content == thought
    assert len(json.loads(found.tool_calls)) == 1


def test_nothing_is_a_call_in_a_thought_that_the_prompt_opens() -> None:
    words = "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    assert words in TAGGED
    thought = "{{ '\n' }}{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    template = TAGGED.replace(words, thought + "{{ m.content or '' }}")
    template = template.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    renderer, tools = Renderer(built(template)), json.dumps(TOOLS)
    reader = renderer.call_reader
    assert reader is not None
    assert reader.thoughts.in_prompt
    call = '<tool_call>{"name": "now"}</tool_call>'
    assert renderer.spoken(f"I could: {call} but", tools, ()).turn.tool_calls == ""
    assert renderer.spoken(f"I will.\n</think>\n\n{call}", tools, ()).turn.tool_calls
    assert reader.words_end("I could: <tool_call> but") == len("I could: <tool_call> but")


def test_a_form_with_what_ends_answers_in_it_is_none() -> None:
    template = TAGGED.replace("<tool_call>\n", "<|im_end|>\n", 1)
    assert Renderer(built(template)).call_reader is None
    # Nor one that writes another prompt once there is a call.
    moved = "{{ 'Called. ' if (messages | selectattr('tool_calls', 'defined') | list) }}" + TAGGED
    assert Renderer(built(moved)).call_reader is None


def test_nothing_is_a_call_without_tools_and_bad_ones_stay_text() -> None:
    renderer = Renderer(built(TAGGED))
    text = '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>'
    assert renderer.spoken(text, "", ()).turn == Message("assistant", text)
    values = ("1e999", "[" * 70 + "]" * 70, '"\\ud800"')
    for bad in (*(text.replace("1e999", value) for value in values), text.replace("now", " ")):
        found = renderer.spoken(bad, json.dumps(TOOLS), ())
        assert found.turn == Message("assistant", bad)
        assert found.problem
    assert spoken(None, text, json.dumps(TOOLS)).turn == Message("assistant", text)
    assert Renderer(byte_level(CHATML)).call_reader is None


def test_calls_are_numbered_through_a_conversation() -> None:
    renderer = Renderer(built(TAGGED))
    text = '<tool_call>{"name": "now"}</tool_call>'
    first = renderer.spoken(text * 2, json.dumps(TOOLS), ()).turn
    then = renderer.spoken(text, json.dumps(TOOLS), (first,)).turn
    ids = [call["id"] for turn in (first, then) for call in json.loads(turn.tool_calls)]
    assert ids == ["call00000", "call00001", "call00002"]
    # A client may have cut the first turns off.
    third = renderer.spoken(text, json.dumps(TOOLS), (then,)).turn
    assert json.loads(third.tool_calls)[0]["id"] == "call00001"
    fourth = renderer.spoken(text, json.dumps(TOOLS), (third,)).turn
    assert json.loads(fourth.tool_calls)[0]["id"] == "call00002"
