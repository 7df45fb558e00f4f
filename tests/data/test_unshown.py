"""Turns that a chat template leaves out, noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tandem.config.dataset import DataConfig
from tandem.data.dataset import load_data
from tandem.data.render import Renderer
from tandem.data.unshown import note_unshown
from tests.data.built_tokenizers import byte_level
from tests.jsonl import write_jsonl

TWO_ROLES = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{{ m.content if m.role == 'assistant' else m.content | upper }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ROWS = [
    {"messages": [{"role": "system", "content": "Be kind."}, *turns]}
    for turns in ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],) * 2
] + [{"prompt": "no other role", "completion": "c"}]


BESIDE_SYSTEM = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if tools and m.role == 'system' %}"
    "{{ tools | tojson }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("shown", ["==", "!="])
def test_tools_are_counted_by_what_their_rows_have(shown: str, tmp_path: Path) -> None:
    """Some templates write tools in the system turn alone; others where there is none."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    system, tools = {"role": "system", "content": "Be kind."}, [{"name": "f"}]
    rows = [{"messages": turns}, {"messages": [system, *turns]}, {"messages": [system, *turns * 2]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "tools": tools}) + "\n" for row in rows))
    found = load_data(DataConfig(heldout=0.0), [str(path)], seed=1, stages=("sft",))
    template = BESIDE_SYSTEM
    if shown == "!=":
        template = template.replace("m.role == 's", "loop.first and m.role != 's")
    note_unshown(found.texts, Renderer(byte_level(template)), found.ledger, "the reward model")
    (account,) = found.ledger.datasets.values()
    note = "column tools is not shown to the reward model: its chat template leaves it out"
    assert dict(account.notes) == {note: 1 if shown == "==" else 2}


@pytest.mark.parametrize(
    ("template", "notes"),
    [
        (TWO_ROLES, {"system turns are not shown: the chat template leaves them out": 2}),
        (TWO_ROLES.replace(" if m.role != 'system'", ""), {}),
        (TWO_ROLES.replace("{% for", "{{ raise_exception('no') if messages[0].role == 'system' }}"
                           "{% for", 1), {}),
    ],
)  # fmt: skip
def test_roles_that_no_model_sees_are_counted(
    template: str, notes: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS)
    tokenizer: PreTrainedTokenizerBase = byte_level(template)
    found = load_data(DataConfig(heldout=0.0), [str(path)], seed=1, stages=("sft",))
    note_unshown([*found.texts, *found.texts], Renderer(tokenizer), found.ledger)
    (account,) = found.ledger.datasets.values()
    assert dict(account.notes) == notes
