"""Names of models in the hub, with a revision behind `@`: `NAME@REVISION`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_revision(text: str) -> tuple[str, str]:
    """A hub name and the branch, tag or commit that follows it; "" if none does.

    Example: "org/model@v1.0" is ("org/model", "v1.0").
    """
    name, _, revision = text.partition("@")
    return name, revision


def base_of(adapter: Mapping[str, Any]) -> str:
    """The base that an adapter's config names, with the revision that it asks for; "" if none."""
    name, revision = adapter.get("base_model_name_or_path"), adapter.get("revision")
    if not isinstance(name, str):
        return ""
    return f"{name}@{revision}" if name and revision else name
