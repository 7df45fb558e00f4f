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


@pytest.mark.parametrize("level", [logging.ERROR, logging.WARNING])
def test_a_level_that_somebody_sets_inside_ends_with_the_block(level: int) -> None:
    """A model's own code may, while it is imported."""
    before = hf_logging.get_verbosity()
    try:
        hf_logging.set_verbosity(level)
        with quiet():
            with quiet():
                hf_logging.set_verbosity_info()
            assert hf_logging.get_verbosity() == logging.ERROR
        assert hf_logging.get_verbosity() == level
    finally:
        hf_logging.set_verbosity(before)
