"""The bench of the server: its figures by hand, and the whole command against real servers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import pauses, serve
from bench.serve import JUDGED, Measured


def test_figures_are_medians_of_rounds_and_the_cost_is_beside_plain_chat() -> None:
    rounds = {
        "tandem": {
            "16": [
                Measured(100, 2.0, 1.0, [0.1, 0.3]),
                Measured(300, 1.0, 1.0, [0.2, 0.0]),  # the last never showed a text
                Measured(200, 4.0, 1.0, [0.4]),
            ]
        },
        JUDGED: {"16": [Measured(100, 4.0, 2.0, [0.5])], "64": [Measured(100, 1.0, 1.0, [0.5])]},
        "llama.cpp": {},
    }
    found = serve.summarized(rounds, "cpu")
    assert found.keys() == {"tandem", JUDGED}
    assert found["tandem"]["16"] == pytest.approx(
        {"tokens_per_second": 200, "first_token_seconds": 0.25, "cpu_share": 0.5}
    )
    assert serve.costs(found) == {"16": 4.0}
    assert serve.summarized(rounds, "wall")["tandem"]["16"]["tokens_per_second"] == 50


@pytest.mark.skipif(find_spec("starlette") is None, reason="needs the extra serve")
@pytest.mark.usefixtures("forked_servers")
def test_the_command_measures_servers_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.json"
    flags = ["--tiny", "--rounds", "1", "--sides", "tandem", JUDGED, "llama.cpp"]
    serve.main([*flags, "--json", str(file)])
    shown = capsys.readouterr().out
    assert "llama.cpp needs --llama-server: left out" in shown
    assert all(word in shown for word in ("first token ms", "cost", JUDGED))
    written = json.loads(file.read_text("utf-8"))
    for side in ("tandem", JUDGED):
        for clients in ("1", "2"):
            (measured,) = written["rounds"][side][clients]
            assert measured["tokens"] == 4 * int(clients)
    assert written["cost_of_reward_and_kl"].keys() == {"1", "2"}


def test_pauses_are_told_in_milliseconds() -> None:
    found = pauses.summarized([0.001 * number for number in range(1, 1001)])
    assert found == pytest.approx(
        {"tokens": 1000, "median": 500.5, "99 %": 990, "99.9 %": 999, "longest": 1000}
    )


def test_the_cpu_clock_counts_another_process_and_this_one() -> None:
    code = "import sys\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            begun, own = pauses.cpu_clock(other.pid), time.process_time()
            while pauses.cpu_clock(other.pid) - begun - (time.process_time() - own) < 0.05:
                time.sleep(0.01)  # the other's time passes, whatever else the processor does
        finally:
            other.kill()


@pytest.mark.skipif(find_spec("starlette") is None, reason="needs the extra serve")
@pytest.mark.parametrize("clock", [pytest.param("wall", marks=pytest.mark.slow), "cpu"])
def test_the_command_measures_pauses(tmp_path: Path, clock: str) -> None:
    file = tmp_path / "made.json"
    flags = ["--tiny", "--rounds", "1", "--pauses", "1", "--clock", clock, "--json", str(file)]
    serve.main(flags)
    of_cases = json.loads(file.read_text("utf-8"))["pauses"]["2"]
    assert of_cases.keys() == set(pauses.CASES)
    for found in of_cases.values():
        assert found["tokens"] > 10
        assert 0 < found["median"] <= found["99 %"] <= found["99.9 %"] <= found["longest"]


def test_somebody_must_be_left_who_does_not_ask(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--clients", "4", "16", "--pauses", "4"])
    assert "--pauses must leave clients" in capsys.readouterr().err
