"""Errors as OpenAI's clients read them."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from tandem.errors import TandemError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          429: "rate_limit_error"}  # fmt: skip


class ApiError(TandemError):
    """A request that is refused: an HTTP status, one line, the field at fault, a code."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """`retry_after`: seconds after which the same request may be accepted."""
        super().__init__(message)
        self.param, self.status, self.code = param, status, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's form, with all of its four keys."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        code = self.code or ("server_error" if self.status >= 500 else "invalid_value")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": code}}

    def response(self) -> Response:
        """The error as an answer to its request."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return json_response(self.body(), self.status, headers)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII, so that no text of a request can break the encoding or a log."""
    return Response(
        json_text(value), status_code=status, media_type="application/json", headers=headers
    )


def json_text(value: Any) -> str:
    """Compact JSON without NaN and infinities, which are no JSON."""
    return _encode(value)


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""Made once: `json.dumps` makes an encoder for every chunk of a stream."""
