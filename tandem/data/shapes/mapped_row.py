"""A row that may compare several answers, as the user's column map has it read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.data.rows import Row
from tandem.data.shapes.aliases import prompt_column, whole_prompt
from tandem.data.turns import Turns, prompt_turns

COMPARED = ("answer_a", "answer_b", "preferred", "answers", "scores", "ranks")
"""The roles of several answers, and of what says which are better."""
FOUND_BESIDE = frozenset(("preferred", "scores"))
"""A column map of no more than these says where the verdict is; the rest is found by name."""
MARKS = ("system", "tools", "label", "margin", "grade")
"""Roles that say something about a row, and not which columns it is read from."""


@dataclass(frozen=True, slots=True)
class MappedRow:
    """A row with mapped columns under their roles, and the column map, role to column."""

    row: Row
    columns: Mapping[str, str]

    @property
    def finds(self) -> bool:
        """Whether columns count that are not called by a role."""
        return self.columns.keys() <= FOUND_BESIDE.union(MARKS)

    def maps(self, *roles: str) -> bool:
        """Whether the user mapped one of these roles."""
        return not self.columns.keys().isdisjoint(roles)

    def own(self, key: str) -> str:
        """The file's name of a column."""
        return self.columns.get(key, key)

    def prompt(self) -> dict[str, str] | None:
        """{"prompt": column} if the prompt has another name, {} if not; None if there is none."""
        if self.row.get("prompt") is not None:
            return {}
        head = prompt_column(self.row) if self.finds else ""
        if not head and self.finds and "human_ref_A" in self.row:  # SHP's
            head = "history" if isinstance(self.row.get("history"), str) else ""
        return {"prompt": head} if head else None

    def turns(self, prompt: dict[str, str]) -> Turns:
        """The turns of the prompt; `prompt` as it comes from `prompt()`.

        Raises:
            RowProblem: it cannot be read.
        """
        name = prompt.get("prompt", "prompt")
        value = whole_prompt(self.row, name)[0] if prompt else self.row[name]
        return prompt_turns(value, self.own(name))
