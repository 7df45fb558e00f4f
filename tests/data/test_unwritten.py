"""Rows whose text the tokenizer cannot write are counted, with the characters that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tandem.config.schema import DataConfig
from tandem.data.dataset import load_text
from tandem.data.ledger import Ledger
from tandem.data.render import Renderer
from tandem.data.unwritten import note_unwritten, unwritten_lines
from tests.data.built_tokenizers import PLAIN, byte_level, sentencepiece
from tests.jsonl import write_jsonl

ROWS = [
    {"prompt": "yes", "completion": "hello"},
    {"prompt": "yes", "completion": "你好 hello"},
    {"prompt": "你", "completion": "yes"},
    {"prompt": "hello", "completion": "yes"},
]


def by_characters(letters: str, unknown: str | None) -> PreTrainedTokenizerBase:
    """BPE of single characters, without tokens for bytes."""
    names = [*letters, "</s>", *([unknown] if unknown else [])]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token=unknown))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[len(letters) :])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token=unknown)


def noted(path: Path, rows: list[dict[str, str]], renderer: Renderer) -> Ledger:
    write_jsonl(path, rows)
    found = load_text([f"{path}:2"], DataConfig(heldout=0), seed=1)
    note_unwritten(found.train, renderer, found.ledger)
    return found.ledger


LETTERS = "abcdefghijklmnopqrstuvwxyzAH: "


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_characters_that_become_unknown_or_nothing(tmp_path: Path, unknown: str | None) -> None:
    renderer = Renderer(by_characters(LETTERS + "\n", unknown))
    ledger = noted(tmp_path / "a.jsonl", ROWS, renderer)
    account = ledger.datasets["a"]
    note = "text that the tokenizer cannot write ('你', '好'), in 50.0% of the rows"
    assert account.notes == {note: 2}
    assert account.noted_at[note] == [f"{tmp_path / 'a.jsonl'}:{line}" for line in (2, 3)]
    (line,) = unwritten_lines(renderer, ledger)
    assert line.startswith(f"warning: a has {note}: ")


def test_few_rows_are_noted_without_a_warning(tmp_path: Path) -> None:
    renderer = Renderer(by_characters(LETTERS + "\n", "<unk>"))
    rows = [{"prompt": "yes" * n, "completion": "hello"} for n in range(1, 40)] + ROWS[1:2]
    ledger = noted(tmp_path / "a.jsonl", rows, renderer)
    assert list(ledger.datasets["a"].notes.values()) == [1]
    assert unwritten_lines(renderer, ledger) == []


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_a_template_that_cannot_be_written(tmp_path: Path, unknown: str | None) -> None:
    renderer = Renderer(by_characters(LETTERS, unknown))
    ledger = noted(tmp_path / "a.jsonl", ROWS[:1], renderer)
    assert not ledger.datasets["a"].notes
    (line,) = unwritten_lines(renderer, ledger)
    assert line.startswith(r"warning: the tokenizer cannot write '\n' of the chat template, so")


def test_tokenizers_that_write_everything_or_whole_words(tmp_path: Path) -> None:
    every = Renderer(byte_level())
    rows = [{"prompt": "yes", "completion": "你好 é\t\u200b😀"}, *ROWS]
    assert not noted(tmp_path / "a.jsonl", rows, every).datasets["a"].notes
    names = ["[unk]", "yes", "hello", "user", "assistant", ":", "</s>"]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[unk]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    by_words = Renderer(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="</s>", unk_token="[unk]", chat_template=PLAIN
        )
    )
    ledger = noted(tmp_path / "a.jsonl", ROWS, by_words)
    note = "text that the tokenizer cannot write, in 50.0% of the rows"
    assert ledger.datasets["a"].notes == {note: 2}
    assert len(unwritten_lines(by_words, ledger)) == 1


def test_a_character_that_a_vocabulary_writes_as_a_space_is_not_lost(tmp_path: Path) -> None:
    renderer = Renderer(sentencepiece())
    rows = [{"prompt": "yes", "completion": "hello yes er"}]
    assert not noted(tmp_path / "a.jsonl", rows, renderer).datasets["a"].notes
