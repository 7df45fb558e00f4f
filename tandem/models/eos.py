"""The EOS tokens of a checkpoint's own generation settings."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from tandem.models.hf_logging import quiet
from tandem.models.source import locate


def load_stop_ids(path: str | Path) -> tuple[int, ...]:
    """The EOS ids of the folder's or hub name's generation_config; none if it has no such file.

    Raises:
        ModelError: there is no such folder or hub name.
    """
    source = locate(path)
    try:
        with quiet():
            settings = GenerationConfig.from_pretrained(source.repository, **source.options)
    except OSError:
        return ()
    return stop_ids(settings)


def stop_ids(settings: GenerationConfig | None) -> tuple[int, ...]:
    """The EOS ids of generation settings: none, one or several."""
    eos = settings.eos_token_id if settings is not None else None
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
