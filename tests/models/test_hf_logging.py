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
            assert hf_logging.get_verbosity() == level
            hf_logging.set_verbosity_info()
        assert hf_logging.get_verbosity() == level
    finally:
        hf_logging.set_verbosity(before)


@pytest.mark.parametrize("propagates", [False, True])
@pytest.mark.parametrize("name", ["transformers.models.llama", "huggingface_hub.file_download"])
def test_lines_below_an_error_are_not_shown(name: str, propagates: bool) -> None:
    """On the library's own handler, and on the root's where its lines go on to there."""
    library, other = logging.getLogger(name.split(".")[0]), logging.getLogger("another.library")
    shown: list[str] = []

    class _Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.getMessage())

    place = logging.getLogger() if propagates else library
    handler, before = _Keeping(), (library.propagate, library.level)
    place.addHandler(handler)
    library.propagate = propagates
    try:
        with quiet():
            logging.getLogger(name).warning("a warning inside")
            hf_logging.set_verbosity_info()
            logging.getLogger(name).info("information")
            logging.getLogger(name).error("an error")
            if propagates:
                other.warning("another's warning")
        logging.getLogger(name).warning("a warning after it")
    finally:
        place.removeHandler(handler)
        library.propagate = before[0]
        library.setLevel(before[1])
    others = ["another's warning"] if propagates else []
    assert shown == ["an error", *others, "a warning after it"]
