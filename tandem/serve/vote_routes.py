"""The routes of votes."""

from __future__ import annotations

import asyncio
import shlex
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.config.stages import STAGES
from tandem.serve import fields
from tandem.serve.api_errors import ApiError, json_response
from tandem.serve.connection import ClientGoneError, read_body
from tandem.serve.service import Service
from tandem.serve.votes import Votes, agreement, read_vote

T = TypeVar("T")


class VoteApi:
    """Votes over HTTP: POST and GET /v1/votes, DELETE /v1/votes/ID."""

    def __init__(self, service: Service) -> None:
        self._service = service
        path = service.votes_file
        self._votes = None if path is None else Votes(path)

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/v1/votes", self._add, methods=["POST"]),
            Route("/v1/votes", self._list, methods=["GET"]),
            Route("/v1/votes/{vote_id}", self._undo, methods=["DELETE"]),
        ]

    def close(self) -> None:
        """Let other servers write the votes."""
        if self._votes is not None:
            self._votes.close()

    async def _add(self, request: Request) -> Response:
        votes = self._kept()
        try:
            body = await read_body(request, self._service.settings.max_body_bytes)
        except ClientGoneError:
            return Response(status_code=499)
        rows = read_vote(body)
        kept, is_new = await _on_disk(lambda: votes.add(rows))
        if is_new:
            self._service.counters.add("votes_total", "Votes kept.", verdict=kept["verdict"])
        return json_response(
            {"object": "vote", **_dated(kept), "new": is_new}, 201 if is_new else 200
        )

    async def _undo(self, request: Request) -> Response:
        votes, vote_id = self._kept(), request.path_params["vote_id"]
        is_new = await _on_disk(lambda: votes.undo(vote_id))
        return json_response({"object": "vote", "id": vote_id, "undone": True, "new": is_new})

    async def _list(self, request: Request) -> Response:
        """The newest `limit` votes, oldest first, and what is true of all of them."""
        votes = self._kept()
        asked: dict[str, Any] = dict(request.query_params)
        text = asked.get("limit", "1000")
        if not (text.isascii() and text.isdigit() and len(text) < 8):
            raise fields.wrong("limit", "be a whole number", text)
        rows = await _on_disk(votes.rows)
        shown = rows[max(0, len(rows) - int(text)) :]
        commands = self._commands(votes)
        return json_response(
            {
                "object": "list",
                "data": [_dated(row) for row in shown],
                "votes": len(rows),
                "rows": sum("chosen" in row for row in rows),
                "by_verdict": Counter(str(row.get("verdict")) for row in rows),
                "agreement": agreement(rows),
                "file": str(votes.path),
                "command": next(iter(commands.values()), ""),
                "commands": commands,
            }
        )

    def _commands(self, votes: Votes) -> dict[str, str]:
        """Command lines that train on the votes, each into a run's folder of its own."""
        run, offer = self._service.offer.run, self._service.offer
        if run is None:
            return {}
        start = offer.models.get(offer.preferred)
        model = shlex.quote(start.path if start is not None else "")
        data = shlex.quote(str(votes.path))
        return {
            stage: f"tandem {stage} --actor-model {model} --data {data} --output-dir "
            f"{shlex.quote(f'{run}-votes-{stage}')}"
            for stage in _trains_on_pairs()
        }

    def _kept(self) -> Votes:
        if self._votes is None:
            raise ApiError(
                "votes need a file, for this server serves no run's folder. Start it with --votes "
                "FILE.",
                code="no_votes_file",
            )
        return self._votes


def _trains_on_pairs() -> list[str]:
    return [stage.name for stage in STAGES if stage.share == "pairs" and not stage.labelled]


def _dated(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its time as seconds since 1970 too."""
    try:
        created = int(datetime.fromisoformat(row["when"]).timestamp())
    except (KeyError, TypeError, ValueError):
        return row
    return {**row, "created": created}


async def _on_disk(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise ApiError(
            f"votes cannot be kept: {error.strerror}. Nothing was written.", status=507
        ) from error
