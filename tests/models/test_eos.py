"""EOS ids from generation settings, however they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from tandem.errors import ModelError
from tandem.models.eos import load_stop_ids, stop_ids


@pytest.mark.parametrize(("eos", "expected"), [([1, 2], (1, 2)), (7, (7,)), (None, ())])
def test_one_several_or_none(
    tmp_path: Path, eos: list[int] | int | None, expected: tuple[int, ...]
) -> None:
    GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
    assert load_stop_ids(tmp_path) == expected


def test_a_folder_without_settings_names_none(tmp_path: Path) -> None:
    assert load_stop_ids(tmp_path) == ()
    assert stop_ids(None) == ()


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"must be a folder with config\.json"):
        load_stop_ids("/nowhere/at/all")
