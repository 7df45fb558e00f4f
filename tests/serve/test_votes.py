"""Votes: kept once, in the shape that training reads, taken back whole, whatever is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.data.shapes.shaping import to_sample
from tandem.serve.api_errors import ApiError
from tandem.serve.votes import Votes, agreement, read_vote
from tandem.types import Source
from tests.jsonl import read_jsonl
from tests.serve.serving import TestClient, serving

Open = Callable[[Path], Votes]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens votes, and closes them at the end."""
    made: list[Votes] = []

    def opened(path: Path) -> Votes:
        made.append(Votes(path))
        return made[-1]

    yield opened
    for votes in made:
        votes.close()


def vote(vote_id: str = "v1", verdict: str = "left", **more: Any) -> dict[str, Any]:
    answers = [
        {"text": "Four.", "model": "ppo", "seed": 1, "reward": 1.5, "kl": 0.2, "tokens": 3},
        {"text": "Five.", "model": "sft", "seed": 1, "reward": -0.5},
    ]
    messages = [{"role": "user", "content": "2+2?"}]
    return {"id": vote_id, "messages": messages, "answers": answers, "verdict": verdict, **more}


def test_one_answer_alone_can_be_rewritten() -> None:
    body = vote(verdict="rewrite", rewrite="It is four.")
    body["answers"] = body["answers"][:1]
    (row,) = read_vote(body)
    assert (row["chosen"], row["rejected"]) == ("It is four.", "Four.")
    with pytest.raises(ApiError, match="2 to 8 answers"):
        read_vote({**body, "verdict": "left"})


def test_a_vote_keeps_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = vote(verdict="best", winner=0, tools=tools)
    body["answers"].append({"text": "Six."})
    rows = read_vote(body)
    assert [row["tools"] for row in rows] == [tools, tools]
    with pytest.raises(ApiError, match="tools must be a list of JSON schemas"):
        read_vote({**body, "tools": [1]})


def test_a_vote_is_a_row_to_train_on(opened: Open, tmp_path: Path) -> None:
    votes = opened(tmp_path / "votes.jsonl")
    for body in (
        vote("a"),
        vote("b", "right", who="ann", blind=True, seed=4),
        vote("c", "rewrite", rewrite="It is four."),
        vote("d", "tie"),
        vote("e", "both_bad"),
    ):
        votes.add(read_vote(body))
    rows = read_jsonl(tmp_path / "votes.jsonl")
    samples = [to_sample(row, Source("v", "v", i)).sample for i, row in enumerate(rows)]
    pairs = [(sample.chosen, sample.rejected) for sample in samples]
    assert pairs == [("Four.", "Five."), ("Five.", "Four."), ("It is four.", "Four."),
                     ("It is four.", "Five."), (None, None), (None, None)]  # fmt: skip
    assert all(sample.prompt[0].content == "2+2?" for sample in samples)
    assert rows[1]["who"] == "ann"
    assert rows[1]["answers"][0]["model"] == "ppo"
    assert rows[1]["winner"] == 1
    assert all("when" in row for row in rows if "id" in row)


def test_training_reads_the_file(
    opened: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.cli import main

    votes = opened(tmp_path / "votes.jsonl")
    for i, verdict in enumerate(("left", "right", "tie")):
        votes.add(read_vote(vote(f"v{i}", verdict)))
    code = main(["data", "check", str(tmp_path / "votes.jsonl"), "--stages", "reward"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "preference" in out


def test_the_same_vote_is_kept_once_and_another_needs_its_own_id(
    opened: Open, tmp_path: Path
) -> None:
    votes = opened(tmp_path / "votes.jsonl")
    first, is_new = votes.add(read_vote(vote()))
    again, is_new_again = votes.add(read_vote(vote()))
    assert (is_new, is_new_again) == (True, False)
    assert first == again
    with pytest.raises(ApiError, match="another's"):
        votes.add(read_vote(vote(verdict="right")))
    votes.close()
    assert opened(tmp_path / "votes.jsonl").add(read_vote(vote()))[1] is False
    assert len(read_jsonl(tmp_path / "votes.jsonl")) == 1


def test_undo_removes_the_row_and_its_id_stays_used(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    votes = opened(path)
    votes.add(read_vote(vote("a")))
    votes.add(read_vote(vote("b", "rewrite", rewrite="It is four.")))
    assert votes.undo("b") is True
    assert votes.undo("b") is False
    assert [row["id"] for row in read_jsonl(path)] == ["a"]
    with pytest.raises(ApiError, match="taken back"):
        votes.add(read_vote(vote("b")))
    with pytest.raises(ApiError, match="must be that of a vote"):
        votes.undo("c")


def test_a_start_finishes_what_was_interrupted(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    votes = opened(path)
    votes.add(read_vote(vote("a")))
    votes.add(read_vote(vote("b")))
    votes.add(read_vote(vote("c", "rewrite", rewrite="It is four.")))
    votes.close()
    whole = path.read_bytes()
    parts = whole.splitlines(keepends=True)
    # Undone was noted, but the file was not replaced yet.
    noted = json.dumps({"id": "a"}) + "\n"
    (tmp_path / "votes.undone.jsonl").write_text(noted)
    # The last vote's second line was cut off.
    path.write_bytes(b"".join(parts[:-1]) + parts[-1][:-20])
    votes = opened(path)
    assert [row["id"] for row in votes.rows()] == ["b", "c"]
    assert path.read_bytes() == b"".join(parts[1:])
    votes.close()
    # A first line that was cut off was never confirmed; one that only lacks its end is kept.
    path.write_bytes(parts[1] + parts[2][:30])
    votes = opened(path)
    assert [row["id"] for row in votes.rows()] == ["b"]
    votes.close()
    path.write_bytes(parts[1].rstrip(b"\n"))
    votes = opened(path)
    votes.add(read_vote(vote("d")))
    assert [row["id"] for row in read_jsonl(path)] == ["b", "d"]


def test_lines_of_others_stay(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    own = '{"prompt": "a", "chosen": "b", "rejected": "c"}\nno JSON\n'
    path.write_text(own)
    votes = opened(path)
    votes.add(read_vote(vote("a")))
    votes.add(read_vote(vote("b")))
    votes.undo("a")
    assert path.read_text().startswith(own)
    assert [row["id"] for row in votes.rows()] == ["b"]


def test_one_server_writes(opened: Open, tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / "votes.jsonl"
    votes = opened(path)
    votes.add(read_vote(vote()))
    code = (
        "import fcntl,sys; f = open(sys.argv[1], 'ab')\n"
        "try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: sys.exit(7)"
    )
    lock = str(tmp_path / ".votes.jsonl.lock")
    assert subprocess.run([sys.executable, "-c", code, lock], check=False).returncode == 7


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"id": ""}, "id"),
        ({"id": "a/b"}, "id"),
        ({"id": 7}, "id"),
        ({"verdict": "up"}, "verdict"),
        ({"verdict": "best"}, "winner"),
        ({"verdict": "best", "winner": 2}, "winner"),
        ({"winner": 1}, "winner"),
        ({"answers": [{"text": "a"}]}, "answers"),
        ({"answers": [{"text": "a"}, {"text": 3}]}, "answers"),
        ({"answers": [{"text": "a"}, {"text": "b", "reward": "x"}]}, "answers"),
        ({"answers": [{"text": "a"}, {"text": "a"}]}, "verdict"),
        ({"answers": [{"text": " "}, {"text": "a"}]}, "verdict"),
        ({"verdict": "rewrite"}, "verdict"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
    ],
)
def test_a_vote_that_is_no_row_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_vote({**vote(), **change})
    assert caught.value.param == param


def test_agreement_counts_votes_with_rewards() -> None:
    rows = [read_vote(vote(str(i), v))[0] for i, v in enumerate(("left", "left", "right", "tie"))]
    found = agreement(rows)
    assert (found["compared"], found["agree"]) == (3, 2)
    assert found["low"] < found["rate"] == 2 / 3 < found["high"]
    assert agreement([]) == {"compared": 0, "agree": 0}


def test_votes_over_http(served_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    with serving(served_run, votes=str(path)) as client:
        assert client.get("/v1/votes").json()["data"] == []
        first = client.post("/v1/votes", json=vote("a"))
        assert (first.status_code, first.json()["new"]) == (201, True)
        assert client.post("/v1/votes", json=vote("a")).status_code == 200
        assert client.post("/v1/votes", json=vote("a", "right")).status_code == 409
        client.post("/v1/votes", json=vote("b", "tie"))
        listed = client.get("/v1/votes?limit=1").json()
        assert [row["id"] for row in listed["data"]] == ["b"]
        assert (listed["votes"], listed["rows"]) == (2, 1)
        assert listed["agreement"]["agree"] == 1
        assert listed["command"].startswith("tandem ")
        assert client.delete("/v1/votes/a").json()["undone"] is True
        assert client.delete("/v1/votes/zzz").status_code == 404
        assert [row["id"] for row in client.get("/v1/votes").json()["data"]] == ["b"]


def test_votes_of_a_plain_model_need_a_file(served_run: Path) -> None:
    with serving(served_run / "sft") as client:
        answer: TestClient = client
        refused = answer.post("/v1/votes", json=vote())
        assert refused.status_code == 400
        assert "--votes FILE" in refused.json()["error"]["message"]
