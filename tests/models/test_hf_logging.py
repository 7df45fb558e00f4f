"""Quiet within, as it was after."""

from __future__ import annotations

import logging

import pytest
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers.utils import logging as hf_logging

from tandem.models.hf_logging import quiet


def _settings() -> tuple[int, bool, bool, int]:
    return (
        hf_logging.get_verbosity(),
        hf_logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
        logging.getLogger("huggingface_hub").level,
    )


@pytest.mark.parametrize("hub_bars", [True, False])
def test_settings_are_restored_even_after_an_error(hub_bars: bool) -> None:
    (enable_progress_bars if hub_bars else disable_progress_bars)()
    before = _settings()

    def fail() -> None:
        with quiet():
            assert hf_logging.get_verbosity() == logging.ERROR
            assert not hf_logging.is_progress_bar_enabled()
            assert are_progress_bars_disabled() != hub_bars, "downloads keep their bars"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert _settings() == before
    enable_progress_bars()
