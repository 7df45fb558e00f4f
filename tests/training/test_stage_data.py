"""Rows of every kind, the same from one process and from several, and errors with them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema import RunConfig
from tandem.data import side_by_side
from tandem.data.render import Renderer
from tandem.errors import DataError
from tandem.models.load import load_tokenizer
from tandem.training.rendering import ANSWER_BY_ANSWER
from tandem.training.run_stages import ledger_lines
from tandem.training.stage_data import StepRows, load_renderer, prepare_rows
from tandem.types import Message, RankedRow, Source, TokenRow
from tests.tiny import tiny_config

COMPARED = [
    field.name
    for field in fields(StepRows)
    if "renderer" not in field.name and "tokenizer" not in field.name
]


def write(path: Path) -> str:
    rows: list[dict[str, Any]] = []
    for number in range(30):
        prompt = f"What is {number} and {number + 1}?"
        rows.append({"prompt": prompt, "chosen": f"It is {number}.", "rejected": "I forget."})
        rows.append({"prompt": f"Tell {prompt}", "completion": "Yes.", "label": number % 2 == 0})
        answers = [f"first {number}", "second", "third"]
        rows.append({"prompt": f"Rank {prompt}", "answers": answers, "ranks": [1, 2, 3]})
        rows.append({"text": f"A text of {number} words. " * (number % 7 + 1)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(config: RunConfig, processes: int, monkeypatch: pytest.MonkeyPatch) -> StepRows:
    monkeypatch.setattr(side_by_side, "num_processes", lambda: processes)
    monkeypatch.setattr(side_by_side, "_WORTH", 1)
    monkeypatch.setattr(side_by_side, "_BLOCK", 4)
    return prepare_rows(config, config.actor_model, config.actor_model)


WRITES_CALLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WRITES_NONE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_prompts_that_a_reward_models_own_template_cannot_write(
    tmp_path: Path, tiny_model: str
) -> None:
    """It reads answers as text: what its template refuses would end the run at its first answer."""
    models = {}
    for name, template in (("policy", WRITES_CALLS), ("reward", WRITES_NONE)):
        models[name] = shutil.copytree(tiny_model, tmp_path / name)
        tokenizer = load_tokenizer(str(models[name]))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(models[name])
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    rows: list[dict[str, Any]] = []
    for number in range(20):
        asked = {"role": "user", "content": f"question {number}"}
        rows.append({"prompt": [{**asked, "content": f"Else: {number}"}]})
        turns = [asked, call, {"role": "tool", "content": "4"}]
        rows.append({"prompt": turns, "tools": [{"name": "f"}]})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        tmp_path / "run", str(models["policy"]), str(path), stages=["grpo"],
        dataset__split=[], dataset__heldout=0.2, dataset__max_prompt_tokens=500,
    )  # fmt: skip
    names = [str(models[name]) for name in ("policy", "reward")]
    with pytest.raises(DataError, match=r"rows.jsonl:\d+: turns must have no tool calls.*reward'"):
        prepare_rows(config, *names)
    dropping = replace(config, dataset=replace(config.dataset, on_bad_row="drop"))
    found = prepare_rows(dropping, *names)
    (account,) = found.ledger.datasets.values()
    assert {len(row.messages) for row in (*found.prompts, *found.heldout_prompts)} == {1}
    lost = account.num_dropped + account.notes[next(n for n in account.notes if "measuring" in n)]
    assert (lost, len(found.prompts) + len(found.heldout_prompts)) == (20, 20)
    note = "column tools is not shown to the reward model: its chat template leaves it out"
    assert account.notes[note] == 20
    assert len(prepare_rows(config, names[0], names[0]).prompts) > len(found.prompts)


@pytest.mark.skipif(sys.platform != "linux", reason="rows are rendered here elsewhere")
@pytest.mark.parametrize(
    ("stages", "kinds"),
    [
        (["sft", "reward", "ppo"], {"sft": 20, "pairs": 20, "prompts": 10}),
        (["kto"], {"labelled": 90}),
        (["dpo"], {"dpo_pairs": 30}),
    ],
)
def test_several_processes_give_the_rows_of_one(
    stages: list[str],
    kinds: dict[str, int],
    tmp_path: Path,
    tiny_model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, write(tmp_path / "rows.jsonl"),
        dataset__split=[], dataset__max_tokens=40, stages=stages,
    )  # fmt: skip
    alone, together = (prepared(config, processes, monkeypatch) for processes in (1, 3))
    for name in COMPARED:
        assert getattr(together, name) == getattr(alone, name), name
    for name, least in kinds.items():
        assert len(getattr(alone, name)) >= least, name
    (account,) = alone.ledger.datasets.values()
    if "sft" in stages:
        assert account.num_dropped, "rows that are too long are counted"
        assert any(isinstance(row, RankedRow) for row in alone.pairs)


def test_a_row_that_cannot_be_rendered_is_named(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Renderer.conversation

    def refuses(
        self: Renderer, messages: Sequence[Message], answer: str, source: Source, *more: Any
    ) -> TokenRow:
        if source.line == 121:
            raise DataError(f"{source}: the template refuses it")
        return conversation(self, messages, answer, source, *more)

    monkeypatch.setattr(Renderer, "conversation", refuses)
    path = tmp_path / "rows.jsonl"
    write(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "Who are you?", "completion": "Nobody."}) + "\n")
    config = tiny_config(
        tmp_path / "run", tiny_model, str(path),
        dataset__split=[], dataset__heldout=0, stages=["sft"],
    )  # fmt: skip
    with pytest.raises(DataError, match=r"rows\.jsonl:121: the template refuses it"):
        prepared(config, 3, monkeypatch)
    dropping = replace(config, dataset=replace(config.dataset, on_bad_row="drop"))
    rows = prepared(dropping, 3, monkeypatch)
    (account,) = rows.ledger.datasets.values()
    assert account.num_dropped == 1
    assert {row.source.line for row in rows.sft}.isdisjoint({121})


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_turns_marked_as_not_learned_stay_off_the_mask(
    loss_on: str, tmp_path: Path, tiny_model: str
) -> None:
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "A draft."}]
    turns += [{"role": "user", "content": "Again."}, {"role": "assistant", "content": "Yes."}]
    rows = [{"messages": turns}, {"messages": [turns[0], {**turns[1], "weight": 0}, *turns[2:]]}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        tmp_path / "run", tiny_model, str(data),
        stages=["sft"], dataset__heldout=0, dataset__split=[1, 0, 0], sft__loss_on=loss_on,
    )  # fmt: skip
    rows = prepare_rows(config, config.actor_model, config.actor_model)
    learned, shown = rows.sft
    assert learned.token_ids == shown.token_ids
    masks = list(zip(learned.response_mask, shown.response_mask, strict=True))
    left = [i for i, mask in enumerate(masks) if mask == (True, False)]
    assert left == list(range(left[0], left[-1] + 1))
    draft = rows.renderer.decode([learned.token_ids[i] for i in left])
    assert draft.strip() == "A draft."
    assert all(a == b for i, (a, b) in enumerate(masks) if i not in left)
    assert all(learned.response_mask[1:]) == (loss_on == "all")


def test_answers_that_a_template_rewrites_are_learned_behind_their_own_prompts(
    tmp_path: Path, tiny_model: str
) -> None:
    """As Qwen3's template, which leaves out the thoughts of answers that are not the last."""
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ '<think> </think> ' if loop.last and m.role == "
        "'assistant' }}{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    said = [("user", "Hi."), ("assistant", "Hello."), ("user", "Again."), ("assistant", "Yes.")]
    turns = [{"role": role, "content": text} for role, text in said]
    long = [turns[0], turns[1], {"role": "user", "content": "Again. " * 300}, turns[3]]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in (turns, long)))
    config = tiny_config(
        tmp_path / "run", tiny_model, str(data),
        stages=["sft"], dataset__heldout=0, dataset__split=[1, 0, 0],
        dataset__chat_template=str(template), dataset__max_tokens=200,
    )  # fmt: skip
    rows = prepare_rows(config, config.actor_model, config.actor_model)
    learned = [
        rows.renderer.decode(
            [i for i, mine in zip(row.token_ids, row.response_mask, strict=True) if mine]
        ).strip()
        for row in rows.sft
    ]
    assert sorted(learned) == ["Hello.", "Hello.", "Yes."]
    (account,) = rows.ledger.datasets.values()
    notes = {note: n for note, n in account.notes.items() if "answer" in note}
    assert notes == {
        f"{ANSWER_BY_ANSWER} (texts)": 2,
        "one of its answers left out: longer than max_tokens (texts)": 1,
    }
    assert account.used["texts"] == 2


def test_a_run_notes_rows_that_look_rendered(tmp_path: Path, tiny_model: str) -> None:
    tokenizer, _ = load_renderer(tiny_model, trust_remote_code=False)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"{word}{tokenizer.eos_token}"}) + "\n"
                            for word in ("one", "two", "three")))  # fmt: skip
    config = tiny_config(
        tmp_path / "run", tiny_model, str(data),
        stages=["sft"], dataset__split=[1, 0, 0], dataset__heldout=0,
    )  # fmt: skip
    rows = prepare_rows(config, config.actor_model, config.actor_model)
    (line,) = ledger_lines(rows)
    told = f"the text spells control tokens {tokenizer.eos_token}, encoded as plain text: it looks"
    assert told in line
    at = f"{tmp_path / 'rows.jsonl'}:1"
    assert line.endswith(f"or prompt and answer without them: 3 (the first: {at})")


def test_a_reward_model_alone_renders_the_prompts_that_it_is_normalized_on(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for number in range(300):
        prompt = f"What is {number}?" + " And then?" * (20 * (number % 2))
        lines.append({"prompt": prompt, "chosen": f"It is {number}.", "rejected": "I forget."})
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rendered: list[Source] = []
    prompt = Renderer.prompt

    def heard(self: Renderer, messages: Any, columns: Any, source: Source, tools: str) -> Any:
        rendered.append(source)
        return prompt(self, messages, columns, source, tools)

    monkeypatch.setattr(Renderer, "prompt", heard)

    def prompts(most: int) -> list[Source]:
        config = tiny_config(
            tmp_path / "run", tiny_model, str(data), stages=["reward"], dataset__split=[],
            dataset__heldout=0.0, dataset__max_prompt_tokens=40, dataset__max_tokens=60,
            dataset__on_long_row="drop", reward__normalize_prompts=most,
        )  # fmt: skip
        rendered.clear()
        rows = prepare_rows(config, tiny_model, tiny_model)
        assert all(len(row) <= 40 for row in rows.prompts)
        return [row.source for row in rows.prompts]

    assert prompts(0) == rendered == []
    some = prompts(16)
    assert len(some) == len(set(some)) == 16
    assert 16 < len(rendered) < 100, "about half of them are too long"
    assert set(some) <= set(rendered)
    assert max(source.line for source in some) > 100, "not the file's first"
    every = prompts(10_000)
    assert len(every) == 150, "all that fit"
    assert len(rendered) == 300
    assert some == every[:16], "the first of them, whose numbers key the answers' randomness"
