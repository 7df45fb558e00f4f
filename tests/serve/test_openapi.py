"""The published document against the application that it describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from starlette.routing import Route

from tandem.serve import unsupported
from tandem.serve.app import make_app
from tandem.serve.service import ServeSettings, Service, load_settings
from tests.serve.serving import CHAT, TEXT, TestClient
from tests.serve.test_refusals import WRONG


def test_every_route_is_described_and_no_other(client: TestClient, served_run: Path) -> None:
    document = client.get("/openapi.json").json()
    settings = ServeSettings(str(served_run))
    service = Service(settings, load_settings(settings))
    routes = [route for route in make_app(service).routes if isinstance(route, Route)]
    service.close()
    known: set[str] = {
        re.sub(r"{name:path}", "{model}", r.path) for r in routes if r.include_in_schema
    }
    known = {path.replace("{vote_id}", "{id}") for path in known}
    assert set(document["paths"]) == known
    text = str(document)
    for name in re.findall(r"'#/components/schemas/(\w+)'", text):
        assert name in document["components"]["schemas"]
    names = [operation["operationId"] for path in document["paths"].values()
             for method, operation in path.items() if method != "parameters"]  # fmt: skip
    assert len(names) == len(set(names))


def test_every_field_that_is_read_is_described(client: TestClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for path, name in ((CHAT, "ChatRequest"), (TEXT, "CompletionRequest")):
        described = schemas[name]["properties"]
        named: set[Any] = {param for where, _, param in WRONG if where == path}
        assert named - {None} <= described.keys()
        assert {*unsupported.BOTH, *unsupported.NEUTRAL} <= described.keys()
    assert schemas["ChatRequest"]["properties"]["model"]["enum"][:2] == ["base", "sft"]
