"""One run's folder and one server for all tests of serving."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Without the extra `serve`, only the chat in the terminal can be tested.
collect_ignore_glob = [] if find_spec("starlette") else ["test_[!c]*.py", "test_c[!h]*.py"]


@pytest.fixture(scope="session")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder; tests that change one copy it."""
    from tests.serve.serving import make_run

    return make_run(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def client(served_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server over that run, whose votes go elsewhere."""
    from tests.serve.serving import serving

    votes = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    with serving(served_run, votes=str(votes), slots=8, max_queue=24) as client:
        yield client
