"""Tandem's own version."""

from __future__ import annotations


def own_version() -> str:
    """As it is installed; 0 from a checkout that is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tandem-rlhf")
    except PackageNotFoundError:
        return "0"
