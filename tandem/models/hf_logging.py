"""Keep transformers' progress bars and log lines off the terminal while models load and save."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers.utils import logging as hf_logging


@contextmanager
def quiet() -> Iterator[None]:
    """Within: no loading bars, no log line below ERROR from transformers or the hub's client.

    What those lines warn about (missing or unexpected weights) is raised as an error instead. The
    bar of a download stays, because minutes of silence are worse.
    """
    hf_bars, hub_bars = hf_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with _errors_only(hf_logging.get_logger().name), _errors_only("huggingface_hub"):
        if hf_bars:
            hf_logging.disable_progress_bar()  # switches the hub's bars off too
            if hub_bars:
                enable_progress_bars()
        try:
            yield
        finally:
            if hf_bars:
                hf_logging.enable_progress_bar()
                if not hub_bars:
                    disable_progress_bars()


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """What handles this logger's lines lets errors alone through, but for a handler that is added
    within; its level stays as it was.

    A level is set only where it changed: for a new one Python visits every logger there is, some
    thousands.
    """
    logger = logging.getLogger(name)
    before = logger.level

    def is_shown(record: logging.LogRecord) -> bool:
        is_ours = record.name == name or record.name.startswith(f"{name}.")
        return record.levelno >= logging.ERROR or not is_ours

    handlers = _handlers(logger)
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)
        if logger.level != before:
            logger.setLevel(before)


def _handlers(logger: logging.Logger | None) -> list[logging.Handler]:
    """Those that a line of this logger reaches."""
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found or [handler for handler in [logging.lastResort] if handler]
