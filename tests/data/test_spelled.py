"""Rows that a chat template seems to have made are counted, and other control strings apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from tandem.config.schema import DataConfig
from tandem.data.dataset import load_text
from tandem.data.render import Renderer
from tandem.data.spelled import note_spelled
from tests.data.built_tokenizers import byte_level
from tests.jsonl import write_jsonl


@pytest.fixture
def thinking() -> PreTrainedTokenizerBase:
    """ChatML with tokens for thoughts, which its template does not write."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return tokenizer


def notes(path: Path, rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> set[str]:
    write_jsonl(path, rows)
    found = load_text([f"{path}:2"], DataConfig(heldout=0), seed=1)
    note_spelled(found.train, Renderer(tokenizer), found.ledger)
    account = found.ledger.datasets[path.stem]
    lines = {
        note: [int(at.rpartition(":")[2]) for at in account.noted_at[note]]
        for note in account.notes
    }
    return {f"{count} at {lines[note]}: {note}" for note, count in account.notes.items()}


def test_rows_that_look_rendered_and_other_control_strings(
    tmp_path: Path, thinking: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"text": "<|im_start|>user\nHi<|im_end|>"},
        {"prompt": "Hi", "completion": "Yo<|im_end|>"},
        {"prompt": "Hi", "completion": "<think>Hm.</think>Yo"},
        {"prompt": "Hi there", "completion": "Yo"},
    ]
    # A row that comes twice by its weight is one.
    assert notes(tmp_path / "a.jsonl", rows, thinking) == {
        (
            "2 at [1, 2]: the text spells control tokens <|im_end|>, <|im_start|>, encoded as "
            "plain text: it looks already rendered. Give its turns as messages, or prompt and "
            "answer without them"
        ),
        "1 at [3]: the text spells control tokens </think>, <think>, encoded as plain text",
    }
    assert not notes(tmp_path / "b.jsonl", rows[3:], thinking)
