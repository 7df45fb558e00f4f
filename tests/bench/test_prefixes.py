"""The bench of shared prefixes runs, and counts what it says."""

from __future__ import annotations

import json
from pathlib import Path

from bench import prefixes


def test_all_works_run_both_ways(tmp_path: Path) -> None:
    file = tmp_path / "made.json"
    prefixes.main(["--tiny", "--json", str(file)])
    made = json.loads(file.read_text("utf-8"))
    for name in ("chat", "rollout", "shot"):
        ran = {way: made[name][way]["prefilled_tokens"] for way in ("with", "without")}
        assert ran["with"] < 0.7 * ran["without"], name
    for name, less in (("alike", 0.7), ("alike-8", 0.9), ("apart", 1.0)):
        ran = {way: made[name][way]["computed_tokens"] for way in ("with", "without")}
        assert ran["with"] <= less * ran["without"], name
    assert made["beside"]["with"]["largest_forward_tokens"] < 128
    assert made["beside"]["without"]["largest_forward_tokens"] >= 128
