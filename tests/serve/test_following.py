"""A server that follows a run: models that change while requests run."""

from __future__ import annotations

from pathlib import Path

from tests.serve.serving import CHAT, ask, serving


def test_a_request_that_starts_on_a_replaced_model_leaves_none_of_its_memory(
    served_run: Path,
) -> None:
    with serving(served_run, follow=True) as client:
        first = client.post(CHAT, json=ask(model="sft")).json()["choices"]
        service = client.service  # type: ignore[attr-defined]
        for _ in range(2):  # prepared while it was replaced, they start behind
            service.engine.retire(service._slots["sft"].loaded)
            assert client.post(CHAT, json=ask(model="sft")).json()["choices"] == first
            service.engine.compute(lambda: None).result(120)
            assert service.engine.free_blocks() == {}
        assert client.post(CHAT, json=ask(model="sft")).json()["choices"] == first
        service.engine.compute(lambda: None).result(120)
        assert service.engine.free_blocks() == {}
