"""Temperature 0 in the API and in chat: the likeliest token."""

from __future__ import annotations

from dataclasses import replace

from tandem.config.schema import SamplingConfig

COLDEST = 1e-4
"""Below it the likeliest token is taken: logits divided by less overflow."""


def as_drawn(sampling: SamplingConfig) -> SamplingConfig:
    """The same with 0 for temperature or top_p as what it asks for."""
    if sampling.temperature >= COLDEST and sampling.top_p > 0:
        return sampling
    return replace(sampling, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
