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

TWO_ROLES = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{{ m.content if m.role == 'assistant' else m.content | upper }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ROWS = [
    {"messages": [{"role": "system", "content": "Be kind."}, *turns]}
    for turns in ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],) * 2
] + [{"prompt": "no other role", "completion": "c"}]


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
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer: PreTrainedTokenizerBase = byte_level(template)
    found = load_data(DataConfig(heldout=0.0), [str(path)], seed=1, stages=("sft",))
    note_unshown([*found.texts, *found.texts], Renderer(tokenizer), found.ledger)
    (account,) = found.ledger.datasets.values()
    assert dict(account.notes) == notes
