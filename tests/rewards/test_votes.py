"""People as a reward: what is asked, which vote belongs to it, and how one votes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tandem.data.shapes.shaping import to_sample
from tandem.errors import ConfigError, DataError
from tandem.rewards.loading import load_reward_function
from tandem.rewards.votes import asked_file, open_questions, question
from tandem.serve.vote_command import ask_all
from tandem.serve.votes import Votes, read_vote
from tandem.types import Source
from tests.jsonl import read_jsonl, write_jsonl
from tests.rewards.voter import voting

HI = [{"role": "user", "content": "Hi"}]
BYE = [{"role": "user", "content": "Bye"}]


def test_votes_become_scores_and_are_asked_for_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "votes.jsonl"
    score = load_reward_function(f"tandem:votes?file={file}")
    stop = threading.Event()
    voter = threading.Thread(target=voting, args=(file, stop))
    voter.start()
    try:
        completions = ["b", "a", "b", "x", "x"]
        found = score(["Hi"] * 3 + ["Bye"] * 2, completions, messages=[HI] * 3 + [BYE] * 2)
    finally:
        stop.set()
        voter.join()
    assert found == [0.0, 1.0, 0.0, None, None], "equal answers are not asked about"
    assert "1 questions wait for a vote: tandem vote" in capsys.readouterr().out
    assert len(asked_file(file).read_text().splitlines()) == 1
    assert score(["Hi"] * 2, ["a", "b"], messages=[HI] * 2) == [1.0, 0.0], "another order"
    assert capsys.readouterr().out == ""
    (line,) = file.read_text().splitlines()
    sample = to_sample(json.loads(line), Source("votes", "vote", 1))
    assert (sample.sample.chosen, sample.sample.rejected) == ("a", "b"), "a row to train on"


def test_a_vote_of_the_server_is_one(tmp_path: Path) -> None:
    file = tmp_path / "votes.jsonl"
    body = {
        "id": "b7",
        "messages": HI,
        "answers": [{"text": "a", "model": "ppo"}, {"text": "b", "model": "ppo"}],
        "verdict": "right",
    }
    votes = Votes(file)
    votes.add(read_vote(body))
    votes.close()
    score = load_reward_function(f"tandem:votes?file={file}")
    assert score(["Hi"] * 2, ["a", "b"], messages=[HI] * 2) == [0.0, 1.0]


def test_a_person_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "votes.jsonl"
    rows = [question(HI, ["one", "two"]), question(BYE, ["three\x1b[2J", "four"])]
    write_jsonl(asked_file(file), rows)
    lines = iter(["7", "", "1", "=", "never read"])
    shown: list[str] = []
    assert ask_all(file, "ann", waits=False, read=lambda _: next(lines), show=shown.append) == 2
    first, second = read_jsonl(file)
    texts = [answer["text"] for answer in first["answers"]]
    place = next(text for text in shown if text.startswith("[1]"))
    assert place.endswith(texts[first["winner"]])
    assert (second["verdict"], second.get("winner")) == ("tie", None)
    assert "\x1b" not in "".join(shown)
    assert open_questions(file) == []
    (file.parent / "more.jsonl.asked.jsonl").write_text(json.dumps(rows[0]) + "\n")
    keys = iter(["s"])
    more = file.parent / "more.jsonl"
    assert ask_all(more, "ann", waits=False, read=lambda _: next(keys), show=shown.append) == 0


def test_who_waits_is_told_that_the_file_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "votes.jsonl"
    row = question(HI, ["one", "two"])
    naps: list[float] = []

    def ask(seconds: float) -> None:
        naps.append(seconds)
        asked_file(file).write_text(json.dumps(row) + "\n")

    monkeypatch.setattr("tandem.serve.vote_command.time.sleep", ask)
    shown: list[str] = []
    assert ask_all(file, "ann", waits=True, read=lambda _: "q", show=shown.append) == 0
    assert shown[0].endswith("votes.jsonl.asked.jsonl, which is not there yet (Ctrl-C ends)")
    assert len(naps) == 1


def test_what_is_no_vote_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tandem:votes\?file=votes.jsonl"):
        load_reward_function("tandem:votes")
    file = tmp_path / "votes.jsonl"
    file.write_text('{"prompt": [], "answers": [{"text": "a"}], "winner": 3}\n')
    with pytest.raises(DataError, match=r"votes.jsonl:1 must be a vote"):
        open_questions(file)
    file.write_text("[]\n")
    with pytest.raises(DataError, match=r"votes.jsonl:1 must be a JSON object"):
        open_questions(file)
