"""What the page reads of run folders, over files written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.testclient import TestClient

from tandem.metrics.answers import ANSWERS_FILE, FOLLOWED_FILE, ROLLOUTS_FILE, ROWS_FILE
from tandem.serve.guard import _is_keyed
from tandem.serve.run_api import routes
from tandem.serve.run_files import GrowingLines
from tests.jsonl import read_jsonl, write_jsonl

STEPS = 6


def answer(step: int, row: int) -> dict[str, Any]:
    """One recorded answer; its reward grows with step and falls with row."""
    return {
        "stage": "ppo", "step": step, "every": 1, "row": row, "group": row, "prompt_id": f"p{row}",
        "prompt": [{"role": "user", "content": f"question {row}"}], "text": f"<b>step{step}</b>",
        "length": 2 + row, "finished": 1, "reward": step - row / 10, "kl": 0.5 * step,
        "tokens": ["<b>", "step"], "logprobs": [-1.0, -2.0], "ref_logprobs": [-1.5, -2.0],
    }  # fmt: skip


def write_run(folder: Path, shift: float = 0.0) -> Path:
    """A run with a PPO stage of six steps and two followed prompts."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("actor_model: base\n", encoding="utf-8")
    metrics = [
        {"stage": "ppo", "step": step, "time": 1.7e9 + step, "values": {
            "reward": float(step), "kl": "nan" if step == 2 else step / 2,
            "heldout_reward": step + shift, "heldout_kl": step / 4}}
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    write_jsonl(folder / "metrics.jsonl", metrics)
    alarm = {"stage": "ppo", "step": 3, "alarm": "kl-high", "value": 9, "threshold": 5}
    write_jsonl(folder / "alarms.jsonl", [{**alarm, "advice": "Raise kl_coef."}])
    write_jsonl(folder / ROLLOUTS_FILE, [answer(s, r) for s in range(1, 7) for r in range(3)])
    numbers = [
        {"stage": "ppo", "step": s, "every": 1, "reward": [0.0, s], "length": [3, 4],
         "kl": [0.1, 0.2], "finished": [1, 0],
         "advantage": {"low": -1, "high": 1, "counts": [1, 2]}}
        for s in range(1, 7)
    ]  # fmt: skip
    write_jsonl(folder / ANSWERS_FILE, numbers)
    followed = [
        {"stage": "ppo", "step": s, "every": 1, "prompt_id": f"h{p}", "text": f"{s}", "length": 1,
         "prompt": [{"role": "user", "content": "held out"}], "reward": shift + s * (1 - 2 * p),
         "finished": 1}
        for s in (0, 3, 6) for p in range(2)
    ]  # fmt: skip
    write_jsonl(folder / FOLLOWED_FILE, followed)
    ledger = {"datasets": [{"name": "d", "rows": 3, "dropped": {"empty": {"count": 1}}}]}
    (folder / "data.json").write_text(json.dumps(ledger), encoding="utf-8")
    (folder / ROWS_FILE).write_text(json.dumps({"texts": []}), encoding="utf-8")
    (folder / "checkpoints" / "ppo" / "step-4").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one")
    write_run(folder / "deep" / "two", shift=2.0)
    outside = write_run(tmp_path_factory.mktemp("outside") / "secret")
    (folder / "linked").symlink_to(outside)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(Starlette(routes=list(routes(folder)))) as client:
        yield client


def got(client: TestClient, path: str, **query: Any) -> Any:
    response = client.get(f"/api/runs{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_runs_are_found_below_the_folder_and_links_are_not_followed(client: TestClient) -> None:
    found = got(client, "")["runs"]
    assert sorted(run["id"] for run in found) == ["deep~two", "one"]
    assert found[0]["stages"] == [
        {"name": "ppo", "title": "PPO", "family": "rl", "steps": 6, "finished": False}
    ]


def test_a_folder_may_be_a_run_itself(folder: Path) -> None:
    with TestClient(Starlette(routes=list(routes(folder / "one")))) as client:
        assert [run["id"] for run in got(client, "")["runs"]] == ["one"]
        assert got(client, "/one")["alarms"] == 1


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/none/metrics?stage=ppo", 404, "run"),
        ("/..%2f..%2fetc/data", 404, None),
        ("/~..~..~etc/data", 404, "run"),
        ("/linked/data", 404, "run"),
        ("/one/metrics?stage=xx", 404, "stage"),
        ("/one/metrics?stage=sft", 404, "stage"),
        ("/one/metrics", 400, "stage"),
        ("/one/rollouts?stage=ppo&sort=size", 400, "sort"),
        ("/one/rollouts?stage=ppo&offset=-1", 400, "offset"),
        ("/one/rollouts?stage=ppo&step=1e3", 400, "step"),
        ("/one/rollout?stage=ppo&step=9&row=0", 404, "row"),
        ("/one/prompt?stage=ppo&id=zz", 404, "id"),
        ("/one/compare?stage=ppo&other=../one", 404, "other"),
        ("/one/nothing", 404, None),
    ],
)
def test_what_is_not_there_is_an_error_in_json(
    client: TestClient, path: str, status: int, param: str | None
) -> None:
    response = client.get(f"/api/runs{path}")
    assert response.status_code == status
    if param is not None:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param


def test_metrics_have_their_meaning_and_points(client: TestClient) -> None:
    names = {
        metric["name"]: metric for metric in got(client, "/one/metrics", stage="ppo")["metrics"]
    }
    assert names["heldout_reward"]["group"] == "held-out"
    assert names["reward"]["last"] == 6.0
    found = got(client, "/one/metrics", stage="ppo", names="reward,kl")["series"]
    assert found["reward"]["values"] == [1, 2, 3, 4, 5, 6]
    assert found["kl"]["values"][:3] == [0.5, "nan", 1.5]


def test_the_frontier_marks_checkpoints_on_disk(client: TestClient) -> None:
    points = got(client, "/one/frontier", stage="ppo")["points"]
    assert [p["step"] for p in points if p["checkpoint"]] == [4]
    assert points[1] == {"step": 2, "kl": 0.5, "reward": 2.0, "heldout": True, "checkpoint": False}


def test_histograms_of_all_steps_share_an_axis(client: TestClient) -> None:
    last = got(client, "/one/histograms", stage="ppo")
    first = got(client, "/one/histograms", stage="ppo", step=1)
    assert (first["step"], last["step"], last["steps"]) == (1, 6, [1, 2, 3, 4, 5, 6])
    for name in ("low", "high"):
        assert first["histograms"]["reward"][name] == last["histograms"]["reward"][name]
    assert last["histograms"]["advantage"]["counts"] == [1, 2]
    assert got(client, "/one/histograms", stage="ppo", step=99)["histograms"] == {}


def test_every_bin_of_lengths_holds_as_many_whole_numbers(client: TestClient) -> None:
    lengths = got(client, "/one/histograms", stage="ppo")["histograms"]["length"]
    width = (lengths["high"] - lengths["low"]) / len(lengths["counts"])
    assert width == pytest.approx(round(width))
    assert lengths["low"] % 1 == 0.5


def test_answers_are_filtered_sorted_and_paged(client: TestClient) -> None:
    found = got(client, "/one/rollouts", stage="ppo", sort="-reward", limit=2, offset=1)
    assert (found["total"], found["matched"], len(found["rows"])) == (18, 18, 2)
    assert [row["reward"] for row in found["rows"]] == [5.9, 5.8]
    assert "tokens" not in found["rows"][0]
    found = got(client, "/one/rollouts", stage="ppo", filter="QUESTION 1", step=2)
    assert [(row["step"], row["row"]) for row in found["rows"]] == [(2, 1)]
    assert got(client, "/one/rollouts", stage="ppo", sort="kl")["rows"][0]["step"] == 1
    assert got(client, "/one/rollouts", stage="ppo", sort="-order")["rows"][0]["step"] == 6


def test_one_answer_has_its_tokens(client: TestClient) -> None:
    assert got(client, "/one/rollout", stage="ppo", step=3, row=2) == answer(3, 2)


def test_a_prompt_is_followed_over_training(client: TestClient) -> None:
    found = got(client, "/one/prompts", stage="ppo")
    assert found["steps"] == [0, 3, 6]
    assert [prompt["last"] for prompt in found["prompts"]] == [6, -6]
    assert [(rate["step"], rate["wins"], rate["losses"]) for rate in found["win_rates"]] == [
        (3, 1, 1),
        (6, 1, 1),
    ]
    assert [x["step"] for x in got(client, "/one/prompt", stage="ppo", id="h1")["followed"]] == [
        0, 3, 6,
    ]  # fmt: skip
    assert len(got(client, "/one/prompt", stage="ppo", id="p1")["trained"]) == 6


def test_two_steps_and_two_runs_are_compared_on_the_same_prompts(client: TestClient) -> None:
    found = got(client, "/one/compare", stage="ppo", step=0)
    assert (found["before"], found["after"], found["win_rate"]["rate"]) == (0, 6, 0.5)
    found = got(client, "/one/compare", stage="ppo", step=6, other="deep~two")
    assert found["win_rate"]["wins"] == 2
    assert found["rows"][0]["after"]["reward"] == found["rows"][0]["before"]["reward"] + 2


def test_a_prompt_of_several_held_out_rows_is_compared_by_its_mean_reward(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = read_jsonl(run / FOLLOWED_FILE)
    again = [line | {"reward": line["reward"] + 20 * (line["step"] == 0)} for line in lines]
    write_jsonl(run / FOLLOWED_FILE, lines + again)
    with TestClient(Starlette(routes=list(routes(tmp_path)))) as client:
        rewards = {
            (line["prompt_id"], line["step"]): line["reward"] + 10 * (line["step"] == 0)
            for line in lines
        }
        wins = sum(rewards[name, 6] > rewards[name, 0] for name, step in rewards if step == 0)
        found = got(client, "/run/prompts", stage="ppo")
        assert [rate["wins"] for rate in found["win_rates"]][-1] == wins
        for prompt in found["prompts"]:
            assert prompt["evaluations"] == 3
            assert (prompt["first"], prompt["last"]) == (
                rewards[prompt["id"], 0],
                rewards[prompt["id"], 6],
            )
        found = got(client, "/run/compare", stage="ppo", step=0)
        assert found["win_rate"]["wins"] == wins
        for row in found["rows"]:
            assert row["before"]["reward"] == rewards[row["id"], 0]
            assert row["before"]["answers"] == 2


def test_answers_without_rewards_have_no_win_rate(tmp_path: Path) -> None:
    """As of distillation, or of a run beside one that scores its answers. Nor has their mean, where
    several held-out rows share a prompt."""
    for name in ("plain", "scored"):
        run = write_run(tmp_path / name)
        lines = read_jsonl(run / FOLLOWED_FILE)
        if name == "plain":
            plain = [{k: v for k, v in line.items() if k != "reward"} for line in lines]
            write_jsonl(run / FOLLOWED_FILE, plain * 2)
    with TestClient(Starlette(routes=list(routes(tmp_path)))) as client:
        for other in ("plain", "scored"):
            found = got(client, "/plain/compare", stage="ppo", step=0, other=other)
            assert found["win_rate"] is None
            assert len(found["rows"]) == 2
            for row in found["rows"]:
                assert row["before"]["answers"] == 2
                assert "reward" not in row["before"]
        assert got(client, "/scored/compare", stage="ppo", step=0)["win_rate"]["wins"] == 1


def test_the_ledger_is_shown(client: TestClient) -> None:
    assert got(client, "/one/data")["ledger"]["datasets"][0]["dropped"]["empty"]["count"] == 1


def test_nothing_is_sent_again_until_a_file_changes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = "/api/runs/run/rollouts"
    with TestClient(Starlette(routes=list(routes(tmp_path)))) as client:

        def ask(tag: str) -> Any:
            return client.get(path, params={"stage": "ppo"}, headers={"If-None-Match": tag})

        first = ask("")
        tag = first.headers["etag"]
        assert ask(tag).status_code == 304
        with (run / ROLLOUTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(answer(7, 0)) + "\n" + '{"stage": "ppo", "st')
        again = ask(tag)
        assert again.status_code == 200
        assert again.json()["total"] == first.json()["total"] + 1  # the half line is not there yet
        with (run / ROLLOUTS_FILE).open("a", encoding="utf-8") as file:
            file.write("ep\n[]\n" + json.dumps(answer(8, 0)) + "\n")
        assert ask("").json()["total"] == first.json()["total"] + 2
        kept = tmp_path / "kept"
        write_jsonl(kept, [answer(2, 0)])
        kept.replace(run / ROLLOUTS_FILE)  # as thinning does
        assert ask("").json()["total"] == 1


def test_damaged_lines_of_answers_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with TestClient(Starlette(routes=routes(tmp_path))) as client:
        assert got(client, "/run")["notices"] == []
        with (run / "answers.jsonl").open("ab") as file:
            file.write(b'{"stage": "ppo", "st\n\nnull\n')
        said = got(client, "/run")["notices"]
    assert said == ["answers.jsonl: 2 lines cannot be read and are left out"]


def test_lines_of_a_file_that_is_replaced_while_it_is_opened_are_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new = tmp_path / "answers.jsonl", tmp_path / "new"
    path.write_text('{"step": 1}\n')
    new.write_text('{"step": 2}\n{"step": 3}\n')
    opened = Path.open

    def replaced(self: Path, mode: str) -> Any:
        file = opened(self, mode)
        if new.exists():
            new.replace(path)
        return file

    monkeypatch.setattr(Path, "open", replaced)
    lines = GrowingLines(path)
    assert [answer.line for answer in lines.refresh()] == [{"step": 1}]
    assert [answer.line for answer in lines.refresh()] == [{"step": 2}, {"step": 3}]


def test_every_route_is_behind_the_key(folder: Path) -> None:
    assert all(_is_keyed(route.path.replace("{run}", "x")) for route in routes(folder))


@pytest.mark.parametrize(
    ("advantage", "counts"),
    [
        ({"low": 0, "high": 1, "counts": [None, 2]}, [2]),
        ({"low": 1, "high": 1, "counts": [2]}, None),
        ({"low": 0, "high": "inf", "counts": [2]}, None),
        ([], None),
    ],
)
def test_advantages_that_are_no_numbers_are_left_out(
    tmp_path: Path, advantage: Any, counts: list[int] | None
) -> None:
    folder = write_run(tmp_path / "run")
    write_jsonl(folder / ANSWERS_FILE, [{"stage": "ppo", "step": 1, "advantage": advantage}])
    with TestClient(Starlette(routes=list(routes(tmp_path)))) as client:
        found = got(client, "/run/histograms", stage="ppo")["histograms"]
    assert found.get("advantage", {}).get("counts") == counts
