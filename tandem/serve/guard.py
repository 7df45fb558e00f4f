"""What every request passes first: Host, Origin, key and size, before any work begins.

A page on another site may send requests to a server on this machine, also under a name that it has
pointed here (DNS rebinding). So a Host must be this server's, and an Origin, if there is one, must
be the Host's own or allowed.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.serve.api_errors import ApiError
from tandem.serve.fields import shown

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_OPEN = ("/health",)
_KEYED = ("/v1", "/api", "/tokenize", "/detokenize", "/metrics")


class Guard:
    """ASGI middleware: refuses, or passes on with security headers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Sequence[str],
        origins: Sequence[str],
        api_key: str,
        max_body_bytes: int,
    ) -> None:
        """
        Args:
            hosts: names that a Host may have beside localhost and addresses.
            origins: those that pages of other sites may have; they get CORS headers.
            api_key: asked for below the API's paths; "": none.
        """
        self._app = app
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = set(origins)
        self._key = api_key.encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        origin = headers.get("origin", [""])[0]
        allowed = origin if origin in self._origins else ""
        asked = headers.get("access-control-request-headers", [""])[0]

        has_begun = False

        async def send_safely(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                given = {name.lower() for name, _ in message["headers"]}
                added = [pair for pair in SECURITY_HEADERS if pair[0] not in given]
                message["headers"] = [*message["headers"], *added, *_cors(allowed, asked)]
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await error.response()(scope, receive, send_safely)
            return
        if allowed and scope["method"] == "OPTIONS":
            await send_safely({"type": "http.response.start", "status": 204, "headers": []})
            await send_safely({"type": "http.response.body", "body": b""})
            return
        try:
            await self._app(scope, receive, send_safely)
        except asyncio.CancelledError:  # only a server that ends cancels a request
            if not has_begun:
                await server_ends().response()(scope, receive, send_safely)

    def _check(self, scope: Scope, headers: dict[str, list[str]]) -> None:
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise ApiError(
                f"Host must be localhost, an address, or allowed by --allow-host; got "
                f"{shown(hosts[0]) if hosts else 'none'}.",
                status=403,
                code="host_not_allowed",
            )
        for origin in headers.get("origin", []):
            parts = urlsplit(origin) if _splits(origin) else None
            is_own = parts is not None and parts.scheme in ("http", "https")
            if origin not in self._origins and not (
                is_own and parts is not None and parts.netloc.lower() == hosts[0].lower()
            ):
                raise ApiError(
                    f"Origin must be this server's own, or allowed by --allow-origin; got "
                    f"{shown(origin)}.",
                    status=403,
                    code="origin_not_allowed",
                )
        is_preflight = scope["method"] == "OPTIONS" and "origin" in headers
        if self._key and not is_preflight and _is_keyed(scope["path"]):
            self._check_key(headers.get("authorization", []))
        self._check_length(headers.get("content-length", []))

    def _check_key(self, given: list[str]) -> None:
        scheme, _, key = (given[0] if given else "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        if len(given) != 1 or scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                "an API key is needed: send the header Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )

    def _check_length(self, given: list[str]) -> None:
        length = given[0] if given else ""
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_body_bytes:
            raise too_large(self._max_body_bytes)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._hosts:
            return True
        try:  # a page cannot point a name at an address and have the address in Host
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def too_large(most: int) -> ApiError:
    """The error of a body over the limit."""
    return ApiError(
        f"a body must have at most {most} bytes; got more. Raise --max-body-mb if it must be.",
        status=413,
        code="body_too_large",
    )


def server_ends() -> ApiError:
    """The error of a request that was not done when the server had to end."""
    return ApiError("the server ends. Ask again later.", status=503, code="server_ends")


def _splits(origin: str) -> bool:
    try:
        urlsplit(origin)
    except ValueError:
        return False
    return True


def _is_keyed(path: str) -> bool:
    return path not in _OPEN and any(path == top or path.startswith(f"{top}/") for top in _KEYED)


def _cors(origin: str, asked: str) -> list[tuple[bytes, bytes]]:
    """What lets a page of an allowed origin send the headers that it asks for (OpenAI's client for
    browsers has many), and read when to ask again."""
    if not origin:
        return []
    names = ", ".join(filter(None, ("authorization, content-type", asked)))
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-headers", names.encode("latin-1")),
        (b"access-control-expose-headers", b"retry-after"),
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"vary", b"origin"),
    ]
