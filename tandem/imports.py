"""What is said before the imports that take seconds, on a busy machine half a minute."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TextIO

from tandem.garbage import collected_seldom


def loading(command: str, file: TextIO | None = None) -> AbstractContextManager[None]:
    """Say that a command loads libraries, at once; what is to be around their imports.

    Args:
        file: where to say it; None: standard output.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"tandem {command}: loading PyTorch and transformers ...", file=file, flush=True)
    return collected_seldom()
