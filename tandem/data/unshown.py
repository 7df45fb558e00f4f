"""Turns and tools that the chat template leaves out, counted per data set.

Templates for two roles alone may pass over the others in silence. Lost words of users and
assistants are refused when the template is first tried; those of other roles are noted.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.data.ledger import Ledger
from tandem.data.render import Renderer
from tandem.types import Sample

_ALWAYS_SHOWN = {"user", "assistant"}


def note_unshown(
    samples: Iterable[Sample], renderer: Renderer, ledger: Ledger, reader: str = ""
) -> None:
    """Note in the ledger how many rows have turns or tools that no model will see.

    Args:
        samples: of the ledger's data sets; one that comes again by its weight counts once.
        reader: the model whose renderer it is, if it has a template of its own.
    """
    shown = f"shown to {reader}: its" if reader else "shown: the"
    hidden: dict[str, bool] = {}
    hides_tools: dict[tuple[bool, bool], bool] = {}
    for sample in {id(sample): sample for sample in samples}.values():
        for role in sorted({turn.role for turn in sample.prompt} - _ALWAYS_SHOWN):
            if role not in hidden:
                hidden[role] = renderer.hides(sample.prompt, role)
            if hidden[role]:
                note = f"{role} turns are not {shown} chat template leaves them out"
                ledger.datasets[sample.source.dataset].note(note, sample.source)
        if sample.tools:
            # A template may have a place for them in the system turn, or beside the user's first.
            roles = [turn.role for turn in sample.prompt]
            kind = ("system" in roles, roles.count("user") > 1)
            if kind not in hides_tools:
                hides_tools[kind] = renderer.hides_tools(sample.prompt)
            if hides_tools[kind]:
                note = f"column tools is not {shown} chat template leaves it out"
                ledger.datasets[sample.source.dataset].note(note, sample.source)
