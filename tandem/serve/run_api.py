"""The page's own routes: what a run's folder holds, as JSON.

Everything is read-only, comes from the files that docs/page.md describes, and answers 304 where
nothing has changed. Errors have the form of OpenAI's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.errors import CheckpointError, ConfigError
from tandem.metrics.records import json_line
from tandem.serve import run_views
from tandem.serve.run_files import RunFiles, Runs

_MOST_ROWS = 500
_MOST_METRICS = 64
_MOST_TEXT = 1000


class RefusedError(Exception):
    """A request that cannot be answered, for the client."""

    def __init__(self, status: int, message: str, param: str) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def routes(folder: Path) -> list[Route]:
    """The routes below /api/runs, over a run's folder or a folder of runs."""
    runs = Runs(folder)

    def every_run(request: Request) -> Any:
        shown = [run_views.summary(name, run) for name, run in runs.all().items()]
        shown.sort(key=lambda run: run["updated"] or 0, reverse=True)
        return {"folder": folder.resolve().name, "runs": shown}

    def of_run(view: Callable[[Request, RunFiles], Any]) -> Callable[[Request], Response]:
        return _answering(lambda request: view(request, _run(runs, request)), runs)

    def one_run(request: Request) -> Any:
        return run_views.details(str(request.path_params["run"]), _run(runs, request))

    def compared(request: Request) -> Any:
        run, stage = _run(runs, request), _stage(request)
        other = _run(runs, request, "other") if "other" in request.query_params else run
        other_stage = _stage(request, "other_stage") or stage
        return run_views.comparison(
            (run, _required(stage), _whole(request, "step")),
            (other, _required(other_stage), _whole(request, "other_step")),
        )

    base = "/api/runs/{run}"
    return [
        Route("/api/runs", _answering(every_run, runs)),
        Route(base, _answering(one_run, runs)),
        Route(f"{base}/metrics", of_run(_metrics)),
        Route(f"{base}/alarms", of_run(lambda q, run: run_views.alarms(run, _stage(q)))),
        Route(f"{base}/frontier", of_run(_frontier)),
        Route(f"{base}/histograms", of_run(_histograms)),
        Route(f"{base}/rollouts", of_run(_rollouts)),
        Route(f"{base}/rollout", of_run(_rollout)),
        Route(f"{base}/prompts", of_run(_prompts)),
        Route(f"{base}/prompt", of_run(_prompt)),
        Route(f"{base}/compare", _answering(compared, runs)),
        Route(f"{base}/data", of_run(lambda q, run: run_views.data(run))),
    ]


def _metrics(request: Request, run: RunFiles) -> Any:
    stage = _logged_stage(request, run)
    names = [name for name in request.query_params.get("names", "").split(",") if name]
    if len(names) > _MOST_METRICS:
        raise RefusedError(
            400, f"names must be at most {_MOST_METRICS}; got {len(names)}.", "names"
        )
    return run_views.series(run, stage, names) if names else run_views.metric_names(run, stage)


def _frontier(request: Request, run: RunFiles) -> Any:
    return run_views.reward_against_kl(run, _logged_stage(request, run))


def _histograms(request: Request, run: RunFiles) -> Any:
    return run_views.histograms(run, _logged_stage(request, run), _whole(request, "step"))


def _rollouts(request: Request, run: RunFiles) -> Any:
    sort = request.query_params.get("sort", "order")
    if sort.removeprefix("-") not in run_views.SORTS:
        known = ", ".join(run_views.SORTS)
        raise RefusedError(400, f"sort must be one of {known}; got {sort[:40]!r}.", "sort")
    text = request.query_params.get("filter", "")
    if len(text) > _MOST_TEXT:
        raise RefusedError(400, f"filter must have at most {_MOST_TEXT} characters.", "filter")
    return run_views.rollouts(
        run,
        _logged_stage(request, run),
        step=_whole(request, "step"),
        text=text,
        sort=sort,
        offset=_whole(request, "offset") or 0,
        limit=min(_MOST_ROWS, _whole(request, "limit") or 100),
    )


def _rollout(request: Request, run: RunFiles) -> Any:
    step, row = _whole(request, "step") or 0, _whole(request, "row") or 0
    found = run_views.rollout(run, _logged_stage(request, run), step, row)
    if found is None:
        raise RefusedError(404, f"no answer {row} of step {step} is recorded.", "row")
    return found


def _prompts(request: Request, run: RunFiles) -> Any:
    return run_views.prompts(run, _logged_stage(request, run))


def _prompt(request: Request, run: RunFiles) -> Any:
    name = request.query_params.get("id", "")
    found = run_views.prompt(run, _logged_stage(request, run), name)
    if found is None:
        raise RefusedError(404, f"no answer to prompt {name[:40]!r} is recorded.", "id")
    return found


def _answering(view: Callable[[Request], Any], runs: Runs) -> Callable[[Request], Response]:
    """A view as an endpoint: its JSON, or the error; 304 where no file of the runs has changed."""

    def endpoint(request: Request) -> Response:
        try:
            name = request.path_params.get("run")
            chosen = runs.all()
            about = [chosen[name]] if name in chosen and "other" not in request.query_params else []
            versions = "".join(run.version() for run in about or chosen.values())
            tag = f'W/"{hashlib.sha256(versions.encode()).hexdigest()[:24]}"'
            headers = {"ETag": tag, "Cache-Control": "no-cache"}
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            body = json_line(view(request)).encode()
        except RefusedError as error:
            return _refusal(error.status, str(error), error.param)
        except (ConfigError, CheckpointError) as error:  # the run was removed meanwhile
            return _refusal(404, str(error), "run")
        return Response(body, media_type="application/json", headers=headers)

    return endpoint


def _refusal(status: int, message: str, param: str) -> Response:
    code = "not_found" if status == 404 else "invalid_value"
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return Response(json_line({"error": error}), status, media_type="application/json")


def _run(runs: Runs, request: Request, param: str = "run") -> RunFiles:
    name = str(request.path_params["run"]) if param == "run" else request.query_params[param]
    found = runs.all().get(name)
    if found is None:
        raise RefusedError(404, f"no run {name[:80]!r} is in this folder.", param)
    return found


def _stage(request: Request, param: str = "stage") -> str | None:
    """The stage that a request names; None if it names none."""
    name = request.query_params.get(param)
    if name is None:
        return None
    try:
        return run_views.stage_name(name)
    except ConfigError:
        raise RefusedError(404, f"no stage is named {name[:40]!r}.", param) from None


def _required(stage: str | None) -> str:
    if stage is None:
        raise RefusedError(400, "stage must be given; got none.", "stage")
    return stage


def _logged_stage(request: Request, run: RunFiles) -> str:
    """The stage that a request names, which must have been logged in the run."""
    stage = _required(_stage(request))
    if all(known.name != stage for known in run.folder().stages()):
        raise RefusedError(404, f"stage {stage} has no records in this run.", "stage")
    return stage


def _whole(request: Request, param: str) -> int | None:
    """A whole number of a request; None if it is not given."""
    text = request.query_params.get(param)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise RefusedError(400, f"{param} must be a whole number >= 0; got {text[:40]!r}.", param)
    return int(text)
