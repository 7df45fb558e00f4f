"""YAML by libyaml, ten times as fast as in Python, where that is safe.

libyaml ends the process where brackets or lists are nested some ten thousand deep, so text from
elsewhere that could be is read in Python, which raises `RecursionError`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LONG_LINE = 500
"""Characters. Blocks nest by indentation, so no deeper than this in lines that are not long."""
_MANY_BRACKETS = 500


def from_yaml(text: str) -> Any:
    """What YAML text says; of a repeated key the last value.

    Raises:
        yaml.YAMLError: it is not YAML. RecursionError: it is nested too deep.
    """
    brackets = text.count("[") + text.count("{")
    longest = max(map(len, text.splitlines()), default=0)
    if brackets < _MANY_BRACKETS and longest < _LONG_LINE:
        # libyaml also refuses what stands for bytes that are not UTF-8.
        with suppress(yaml.YAMLError, UnicodeError):
            return yaml.load(text, _Loader)
    return yaml.safe_load(text)


def shipped_table(path: Path) -> Any:
    """The content of a file that is part of the package."""
    return from_yaml(path.read_text("utf-8"))


def as_yaml(values: Any) -> str:
    """Mappings, lists, strings and numbers as YAML, keys in their order.

    Characters outside ASCII are escaped: YAML would fold some of Unicode's line breaks into spaces.
    """
    text: str
    try:
        text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    except UnicodeEncodeError:  # bytes of a name that are not UTF-8, which libyaml does not take
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False)
    return text
