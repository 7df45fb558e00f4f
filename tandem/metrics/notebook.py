"""Progress in a notebook: one output that is updated in place, without carriage returns."""

from __future__ import annotations

import html
import sys
from typing import Any


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ in ("ZMQInteractiveShell", "Shell")


class NotebookBar:
    """A stage's progress bar; `update` changes it in place."""

    def __init__(self, stage: str, num_steps: int, done: int) -> None:
        """`num_steps` is 0 if unknown."""
        self._stage, self._num_steps = stage, num_steps
        self._handle: Any = None
        self.update(done, "")

    def update(self, done: int, eta: str) -> None:
        """Show that `done` steps are over, and the time that is left."""
        from IPython.display import display

        of = f"/{self._num_steps}" if self._num_steps else ""
        text = f"{self._stage} {done}{of}{f', {eta} left' if eta else ''}"
        bar = f'<progress value="{done}" max="{max(self._num_steps, done, 1)}"></progress>'
        shown = {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
