"""Names of models in the hub, with a revision behind `@`: `NAME@REVISION`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def with_revision(text: str) -> tuple[str, str]:
    """A hub name and the branch, tag or commit that follows it; "" if none does.

    Example: "org/model@v1.0" is ("org/model", "v1.0").
    """
    name, _, revision = text.partition("@")
    return name, revision


def base_of(adapter: Mapping[str, Any], folder: str | Path) -> str:
    """The base that an adapter's config names, of the hub with the revision that it asks for; "" if
    none.

    Args:
        folder: the adapter's, where a base's relative path may start.
    """
    name, revision = adapter.get("base_model_name_or_path"), adapter.get("revision")
    if not isinstance(name, str):
        return ""
    is_folder = Path(name).is_dir() or (Path(folder) / name).is_dir()
    return f"{name}@{revision}" if name and revision and not is_folder else name
