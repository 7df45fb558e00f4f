"""A YAML file's content, in which every key stands once."""

from __future__ import annotations

import stat
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once: the last of several would silently replace the others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As YAML says, but for repeated keys."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value} a second time", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def read_file(path: str | Path) -> Any:
    """The content of a YAML file.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    path = Path(expanduser(path))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "not a file")  # a pipe or a device may never end
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(
            f"--config must be a readable YAML file; got {path} ({error.strerror}). Check the path."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a name with a NUL in it
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise ConfigError(f"{path}{line} must be YAML; got: {problem}. {_fix(problem)}.") from None
    return {} if raw is None else raw


def _fix(problem: str) -> str:
    """What to do about a problem in the words of PyYAML, which knows tokens and no columns."""
    if r"'\t'" in problem:
        return "Indent by spaces, not by tabs"
    if "<block" in problem or problem.startswith("mapping values"):
        return "Begin all keys of one section in the same column, each on its own line"
    return "Fix the file"
