"""The ASGI application: routes, the page, errors in one form, and the guard in front."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.staticfiles import StaticFiles

from tandem.serve import run_api
from tandem.serve.api_errors import ApiError
from tandem.serve.guard import Guard
from tandem.serve.routes import Api
from tandem.serve.service import Service
from tandem.serve.vote_routes import VoteApi


def make_app(service: Service) -> Starlette:
    """The application of a service; it closes the service when it ends."""
    settings = service.settings
    votes = VoteApi(service)
    routes: list[BaseRoute] = [*Api(service).routes(), *votes.routes()]
    shown = Path(settings.runs) if settings.runs else service.offer.run
    if shown is not None:
        routes += run_api.routes(shown)
    page = Path(str(files("tandem.serve") / "page"))
    routes.append(Mount("/", StaticFiles(directory=page, html=True), name="page"))
    hosts = (*settings.allow_hosts, settings.host)
    guard = Middleware(
        Guard,
        hosts=hosts,
        origins=settings.allow_origins,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        votes.close()
        service.close()

    handlers: dict[Any, Any] = {
        ApiError: _refused,
        HTTPException: _not_found,
        Exception: _failed,
    }
    return Starlette(
        routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = _methods_of(request)
    if error.status_code in (404, 405) and allowed and request.method not in allowed:
        named = ", ".join(sorted(allowed))
        response = ApiError(
            f"this address takes {named}.", status=405, code="method_not_allowed"
        ).response()
        response.headers["Allow"] = named
        return response
    if error.status_code in (404, 405):  # the page, which has every other address, takes GET alone
        return ApiError("there is no such address.", status=404, code="not_found").response()
    response = ApiError(f"{error.detail}.", status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


def _methods_of(request: Request) -> set[str]:
    """What the address of a request takes; nothing if no route has it."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in route.methods or ()}


async def _failed(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return ApiError(f"the server failed: {type(error).__name__}.", status=500).response()
