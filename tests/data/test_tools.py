"""Tools and calls as rows have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.config.dataset import DataConfig
from tandem.config.schema import RunConfig
from tandem.data.dataset import load_data, read_all
from tandem.data.ledger import Ledger
from tandem.data.length import fit_prompt
from tandem.data.render import Renderer
from tandem.data.rows import RowProblem
from tandem.data.shapes.shaping import to_sample
from tandem.data.side_by_side import RendersRows, side_by_side
from tandem.data.spelled import note_spelled
from tandem.data.split import content_key
from tandem.data.tools import for_template, read_calls, read_tools, without_nulls
from tandem.data.turns import turns_of
from tandem.data.unshown import note_unshown
from tandem.errors import DataError
from tandem.plan.prompt_frame import PromptFrame
from tandem.training.rendering import Rendering
from tandem.types import Message, Sample, Source
from tests.data.built_tokenizers import CHATML, byte_level
from tests.data.test_tool_rendering import CALL, RESULT, SAID, TAGGED, TOOLS, built
from tests.jsonl import write_jsonl

HERE = Source("set", "rows.jsonl", 1)
ASKED = {"role": "user", "content": "How is the weather in Oslo?"}
ALONE = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
ADD = {"name": "add", "arguments": {"a": 2, "b": None}}


@pytest.mark.parametrize("value", [None, "", " ", [], "[]", "null"])
def test_empty_columns_list_no_tools(value: Any) -> None:
    assert read_tools(value) == ""
    found = to_sample({"prompt": "hi", "tools": value}, HERE)
    assert (found.sample.tools, found.notes) == ("", ())


@pytest.mark.parametrize(
    "value",
    [
        [ALONE],
        json.dumps([ALONE]),
        [{"type": "function", "function": ALONE}],
        [{"type": "function", **ALONE}],
        ALONE,
        json.dumps(ALONE),
        [json.dumps(ALONE)],
    ],
)
def test_tools_are_schemas_or_their_text_and_a_function_alone_is_put_into_one(value: Any) -> None:
    assert json.loads(read_tools(value)) == [{"type": "function", "function": ALONE}]


def test_tools_of_other_kinds_are_as_given() -> None:
    assert json.loads(read_tools([{"type": "web_search"}, *TOOLS])) == [
        {"type": "web_search"},
        *TOOLS,
    ]
    assert "°" in read_tools([{"name": "°"}])


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return [value]


@pytest.mark.parametrize(
    ("value", "found", "expected"),
    [
        ({"brand": "x"}, "an object with columns brand", "be a list of JSON schemas"),
        ([{"brand": "x"}], "an object with columns brand in it", "be a list of JSON schemas"),
        ([ALONE, {}], "an object with no columns in it", "be a list of JSON schemas"),
        ('[{"name": "a", "name": "b"}]', "'name' twice", "name each key once"),
        (["add"], "a list of 1", "be a list of JSON schemas"),
        ("[{'name': 'add'}]", "no JSON", "be a list of JSON schemas"),
        ([{"name": "\ud800"}], "half a surrogate pair", "be valid Unicode"),
        ([{"name": b"x"}], "bytes b'x'", "hold only what JSON has"),
        ([{1: "x"}], "int 1", "hold only what JSON has"),
        ([{"x": float("nan")}], "float nan", "hold only what JSON has"),
        (nested(70), "more than 64 levels", "be nested less deeply"),
        ("[" * 100_000, "no JSON", "be a list of JSON schemas"),
    ],
)
def test_wrong_tools_are_refused(value: Any, found: str, expected: str) -> None:
    with pytest.raises(RowProblem) as error:
        read_tools(value)
    assert (error.value.field, error.value.found[: len(found)]) == ("tools", found)
    assert error.value.expected.startswith(expected)


def test_calls_are_kept_as_given_and_are_given_in_full() -> None:
    given = [{"id": "1", "type": "function", "function": ADD}]
    text = read_calls(given, "m", 1)
    assert json.loads(text) == given
    assert json.loads(for_template(text, as_text=False)) == given
    as_text = json.loads(for_template(text, as_text=True))
    assert as_text[0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": null}'}
    for alone in ([ADD], json.dumps([{**ADD, "arguments": '{"a": 2, "b": null}'}])):
        found = json.loads(for_template(read_calls(alone, "m", 1), as_text=False))
        assert found == [{"type": "function", "function": ADD}]
    for none in (
        {"name": "now"},
        {"name": "now", "arguments": ""},
        {"name": "now", "arguments": None},
    ):
        found = json.loads(for_template(read_calls([none], "m", 1), as_text=False))
        assert found == [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    # Llama 3's name for them.
    named = read_calls([{"name": "f", "parameters": {"a": 1}}], "m", 1)
    assert json.loads(named) == [{"name": "f", "parameters": {"a": 1}}]
    for as_text_too, arguments in ((False, {"a": 1}), (True, '{"a": 1}')):
        (found,) = json.loads(for_template(named, as_text=as_text_too))
        assert found["function"] == {"name": "f", "arguments": arguments}
    # What is text already keeps its spaces.
    text = read_calls([{"function": {"name": "f", "arguments": '{"a":1}'}}], "m", 1)
    assert json.loads(for_template(text, as_text=True))[0]["function"]["arguments"] == '{"a":1}'


@pytest.mark.parametrize(
    ("value", "field", "found"),
    [
        ({"function": ADD}, "m", "an object with columns function in turn 2"),
        ("add(2)", "m", "no JSON ('add(2)')"),
        ([{"id": "1"}], "m", "an object with columns id in turn 2"),
        ([{"function": {"name": " "}}], "m", "an object with columns function in turn 2"),
        (["add"], "m", "'add' in turn 2"),
        ([{"name": "add", "arguments": "2"}], "m.arguments", "'2' in turn 2"),
        ([{"name": "add", "arguments": "{'a'"}], "m.arguments", "\"{'a'\" in turn 2"),
        ([{"name": "add", "arguments": [2]}], "m.arguments", "a list of 1 in turn 2"),
        ([{"name": "add", "arguments": '{"a": 1, "a": 2}'}], "m.arguments", "'a' twice"),
        ([{"name": "add", "input": {"a": 1}}], "m", "'input' in turn 2"),
        ([{"name": "add", "parameters": "a"}], "m", "'parameters' in turn 2"),
        ([{"function": {"name": "add"}, "arguments": {"a": 1}}], "m", "'arguments' in turn 2"),
    ],
)
def test_wrong_calls_are_refused(value: Any, field: str, found: str) -> None:
    with pytest.raises(RowProblem) as error:
        read_calls(value, "m", 2)
    assert (error.value.field, error.value.found) == (field, found.replace('"', "'"))


def test_turns_with_calls() -> None:
    asked, called, answered = turns_of([ASKED, CALL, RESULT], "m")
    assert asked == Message("user", ASKED["content"])
    assert called.as_dict() == {"content": "", **CALL}
    assert answered.as_dict() == RESULT
    # OpenAI's older way, and ShareGPT's of LLaMA-Factory.
    old = {"role": "assistant", "content": None, "function_call": ADD}
    (turn,) = turns_of([old], "m")
    assert json.loads(turn.tool_calls) == [{"type": "function", "function": ADD}]
    for value in (json.dumps(ADD), json.dumps([ADD])):
        (turn,) = turns_of([{"from": "function_call", "value": value}], "m")
        assert (turn.role, json.loads(turn.tool_calls)) == ("assistant", [ADD])
    (turn,) = turns_of([{"role": "function", "name": "add", "content": "4"}], "m")
    assert turn == Message("tool", "4", name="add")
    # In a table every turn has the keys of all.
    table = {"tool_calls": None, "tool_call_id": None, "name": None}
    assert turns_of([{**table, **ASKED}, {**table, **SAID}], "m") == turns_of([ASKED, SAID], "m")
    unlearned = turns_of([{**CALL, "train": False}], "m")[0]
    assert (unlearned.learned, unlearned.tool_calls) == (False, called.tool_calls)


@pytest.mark.parametrize(
    ("turn", "field", "found"),
    [
        (
            {"role": "user", "content": "x", "tool_calls": [ADD]},
            "m",
            "tool calls of user in turn 1",
        ),
        ({"from": "function_call", "value": "add(2)"}, "m.value", "'add(2)' in turn 1"),
        ({"from": "function_call", "value": None}, "m.value", "null in turn 1"),
        ({"role": "tool", "content": "4", "name": 4}, "m.name", "the number 4 in turn 1"),
        ({"role": "tool", "content": None}, "m.content", "null in turn 1"),
        ({"role": "assistant", "content": None}, "m.content", "null in turn 1"),
        (
            {"role": "assistant", "content": 4, "tool_calls": [ADD]},
            "m.content",
            "the number 4 in tu",
        ),
    ],
)
def test_bad_turns_with_calls(turn: dict[str, Any], field: str, found: str) -> None:
    with pytest.raises(RowProblem) as error:
        turns_of([turn], "m")
    assert (error.value.field, error.value.found[: len(found)]) == (field, found)


def sample(row: dict[str, Any], **columns: str) -> Sample:
    return to_sample(row, HERE, columns).sample


def test_rows_with_tools() -> None:
    messages = {"messages": [ASKED, CALL, RESULT, SAID], "tools": TOOLS}
    found = to_sample(messages, HERE)
    assert (found.sample.chosen, found.notes) == ("It rains.", ())
    assert json.loads(found.sample.tools) == TOOLS
    assert found.sample.columns == {"tools": TOOLS}  # for reward functions
    last = sample({"messages": [ASKED, CALL], "tools": json.dumps(TOOLS)})
    assert isinstance(last.chosen, Message)
    assert last.chosen.as_dict() == {"content": "", **CALL}
    assert last.tools == found.sample.tools
    shared = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    assert (
        json.loads(sample({**shared, "tools": json.dumps([ALONE])}).tools)[0]["function"] == ALONE
    )
    pair = {"prompt": [ASKED], "chosen": [CALL], "rejected": [SAID], "tools": TOOLS}
    assert isinstance(sample(pair).chosen, Message)
    assert (sample(pair).rejected, sample(pair).tools) == ("It rains.", last.tools)
    with pytest.raises(RowProblem, match="rejected must differ from chosen"):
        sample({**pair, "rejected": [CALL]})
    (given,) = CALL["tool_calls"]
    text = {**given["function"], "arguments": ' {"days": 2, "city": "Oslo"}'}
    for same in ({**given, "id": "x"}, given["function"], {"function": text}):
        with pytest.raises(RowProblem, match="rejected must differ from chosen"):
            sample({**pair, "rejected": [{"role": "assistant", "tool_calls": [same]}]})
    assert json.loads(sample({"prompt": "hi", "tools": TOOLS}).tools) == TOOLS
    mapped = sample({"q": "hi", "functions": [ALONE]}, prompt="q", tools="functions")
    assert json.loads(mapped.tools)[0]["function"] == ALONE
    assert mapped.columns == {"functions": [ALONE]}


def test_a_tool_may_answer_nothing_and_its_number_is_text() -> None:
    silent = {"role": "tool", "content": "", "tool_call_id": 7}
    assert sample({"messages": [ASKED, CALL, silent, SAID]}).prompt[-1] == Message(
        "tool", "", tool_call_id="7"
    )
    with pytest.raises(RowProblem, match="have no blank turn"):
        sample({"messages": [{**ASKED, "content": " "}, CALL, silent, SAID]})


BRAND = {"brand": "Bosch"}


@pytest.mark.parametrize(
    "value", [["add", "now"], "add, now", 4, BRAND, [BRAND], [{}], json.dumps([BRAND])]
)
def test_a_column_that_lists_no_tools_is_noted_or_refused_where_it_is_mapped(value: Any) -> None:
    found = to_sample({"prompt": "hi", "tools": value}, HERE)
    assert found.sample.tools == ""
    assert found.notes == ("column tools is not rendered: it is no list of JSON schemas",)
    with pytest.raises(RowProblem, match=r"^t must be a list of JSON schemas"):
        to_sample({"prompt": "hi", "t": value}, HERE, {"prompt": "prompt", "tools": "t"})
    for like in ("[{'name': 'add'}]", [ALONE, "add"]):
        with pytest.raises(RowProblem, match="tools must be a list of JSON schemas"):
            to_sample({"prompt": "hi", "tools": like}, HERE)


def test_a_second_kind_of_call_in_a_turn_is_noted() -> None:
    both = {**CALL, "function_call": ADD}
    note = "function_call of turns is not read beside tool_calls"
    assert to_sample({"messages": [ASKED, both]}, HERE).notes == (note,)
    assert to_sample({"messages": [ASKED, CALL]}, HERE).notes == ()


def test_rows_with_other_tools_or_calls_are_other_rows() -> None:
    rows = [
        {"messages": [ASKED, CALL, RESULT, SAID]},
        {"messages": [ASKED, CALL, RESULT, SAID], "tools": TOOLS},
        {"messages": [ASKED, CALL, {**RESULT, "name": "x"}, SAID]},
        {"messages": [ASKED, {**CALL, "tool_calls": [ADD]}, RESULT, SAID]},
        {"messages": [ASKED, CALL]},
        {"messages": [ASKED, {**CALL, "tool_calls": [ADD]}]},
    ]
    assert len({content_key(sample(row)) for row in rows}) == len(rows)


def calls_of(function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


F, G = ({"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {"b": 3}})
TABLES: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "tools and calls": (
        [{"messages": [ASKED, calls_of(f)], "tools": [{**ALONE, "parameters": {"properties": p}}]}
         for f, p in ((F, {"a": {"type": "string"}}), (G, {"b": {"enum": [1]}}))],
        {},
    ),
    "OpenAI's older calls": (
        [{"messages": [ASKED, {"role": "assistant", "content": None, "function_call": f}]}
         for f in (F, G)],
        {},
    ),
    "answers of one message": (
        [{"prompt": "q", "chosen": calls_of(f), "rejected": SAID} for f in (F, G)], {},
    ),
    "a mapped column": (
        [{"prompt": "q", "functions": [{"name": "f", "parameters": {name: {"x": "y"}}}]}
         for name in ("a", "b")],
        {"prompt": "prompt", "tools": "functions"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_write_null_where_nothing_was_given(name: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows, columns = TABLES[name]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write_jsonl(tmp_path / "rows.jsonl", rows)
    found = []
    for file in ("rows.parquet", "rows.jsonl"):
        mapped = ",".join(f"{role}={column}" for role, column in columns.items())
        named = f"{tmp_path / file}" + f"::{mapped}" * bool(mapped)
        samples = [row.sample for row in read_all(DataConfig(), [named], (), Ledger(), seed=1)]
        found.append([(s.chosen, s.rejected, s.tools, s.prompt) for s in samples])
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_nulls_of_other_columns_are_given() -> None:
    row = {"tools": None, "other": {"b": None}, "more": [None, 1], "x": [[None], None]}
    assert without_nulls(row) == row


@pytest.mark.parametrize("saved", [False, True])
def test_a_turn_that_is_null_is_one_bad_row_of_a_table(saved: bool, tmp_path: Path) -> None:
    turns = [{**ASKED, "tool_calls": None}, calls_of(F)]
    rows = [{"messages": [*turns, None] if i == 4 else turns} for i in range(6)]
    path = tmp_path / "rows.parquet"
    if saved:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(str(path := tmp_path / "saved"))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    config = DataConfig(heldout=0.0, on_bad_row="drop")
    found = load_data(config, [str(path)], seed=1, stages=("sft",))
    (account,) = found.ledger.datasets.values()
    assert (account.rows, account.num_dropped) == (6, 1)
    with pytest.raises(DataError, match=r":5: field messages must have only objects; found null"):
        load_data(DataConfig(), [str(path)], seed=1)


ROWS: list[dict[str, Any]] = [
    {"messages": [ASKED, CALL], "tools": TOOLS},
    {"messages": [ASKED, CALL, RESULT, SAID], "tools": TOOLS},
    {"messages": [ASKED, SAID]},
]


def loaded(folder: Path) -> Any:
    path = folder / "rows.jsonl"
    write_jsonl(path, ROWS)
    return load_data(DataConfig(heldout=0.0), [str(path)], seed=1, stages=("sft",))


def test_rows_for_sft(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    tokenizer = built(TAGGED)
    rendering = Rendering(
        RunConfig(dataset=DataConfig(max_tokens=4096, max_prompt_tokens=4096)), found.ledger
    )
    rows = rendering.texts(found.texts, Renderer(tokenizer), "texts")
    said = [
        tokenizer.decode([i for i, m in zip(r.token_ids, r.response_mask, strict=True) if m])
        for r in rows
    ]
    called = (
        '<tool_call>\n{"name": "weather_of", "arguments": {"city": "Oslo", "days": 2}}\n'
        "</tool_call><|im_end|>"
    )
    assert sorted(said) == sorted([called, called + "It rains.<|im_end|>", "It rains.<|im_end|>"])
    prompts = rendering.prompts(found.texts, Renderer(tokenizer), None)
    assert sorted(len(p.messages) for p in prompts) == [1, 1, 3]
    assert [("tools" in p.columns) == bool(p.tools) for p in prompts] == [True] * 3


def test_what_a_template_leaves_out_is_noted_or_dropped(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    renderer = Renderer(byte_level(CHATML))
    note_unshown(found.texts, renderer, found.ledger)
    note_spelled(found.texts, renderer, found.ledger)
    (account,) = found.ledger.datasets.values()
    assert dict(account.notes) == {"column tools is not shown: the chat template leaves it out": 2}
    config = RunConfig(dataset=DataConfig(on_bad_row="drop"))
    rows = Rendering(config, found.ledger).texts(found.texts, renderer, "texts")
    assert len(rows) == 1
    assert account.num_dropped == 2


def test_several_processes_render_the_same(tmp_path: Path) -> None:
    samples = loaded(tmp_path).texts * 3
    renderer = Renderer(built(TAGGED))

    def use(sample: Sample, renderer: RendersRows) -> list[Any]:
        answer = sample.chosen or ""
        prompt = renderer.prompt(sample.prompt, None, HERE, sample.tools)
        return [prompt, renderer.conversation(sample.prompt, answer, HERE, False, sample.tools)]

    with side_by_side(renderer, samples, use, 2) as renderers:
        found = [use(sample, its) for sample, its in zip(samples, renderers, strict=True)]
    assert found == [use(sample, renderer) for sample in samples]


@pytest.mark.parametrize("template", [TAGGED, CHATML])
def test_a_plan_counts_tools_and_calls(template: str, tmp_path: Path) -> None:
    tokenizer = built(template)
    tokenizer.save_pretrained(tmp_path)
    called = read_calls(CALL["tool_calls"], "m", 1)
    turns = (Message("user", "Oslo?"), Message("assistant", "", tool_calls=called))
    turns = (*turns, Message("tool", "rain"))
    tools = read_tools(TOOLS)

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    frame = PromptFrame(tmp_path, count, 0)
    if template == TAGGED:
        assert frame.tokens(turns, tools) == len(Renderer(tokenizer).prompt(turns, tools=tools))
    plain = (turns[0], Message("assistant", ""), turns[2])
    assert frame.tokens(plain, tools) - frame.tokens(plain) == (
        len(Renderer(tokenizer).prompt(turns[:1], tools=tools))
        - len(Renderer(tokenizer).prompt(turns[:1]))
    )


def test_a_shortened_prompt_keeps_its_tools() -> None:
    renderer = Renderer(built(TAGGED))
    turns = turns_of([ASKED, CALL, RESULT, SAID, ASKED], "m")
    whole = renderer.prompt(turns, {}, HERE, TOOLS)
    last = renderer.prompt(turns[-1:], {}, HERE, TOOLS)
    fitted = fit_prompt(whole, len(last), "truncate", renderer)
    assert fitted.row == last
    assert last.tools == whole.tools != ""
