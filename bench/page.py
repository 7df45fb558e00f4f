"""How smoothly the page scrolls through a run's recorded answers: frames that took too long.

    python bench/page.py --rows 10000 --json page.json

Debian's chromium (pip install playwright), at 1280 and at 390 pixels, shows the rollouts of a run
that `tandem serve` serves. A script scrolls the list by so many pixels at every frame: as one
reads, as one flings a list, and by whole screens, which no hand does. A frame is the time between
two calls of requestAnimationFrame, 16.7 ms apart where nothing is late; server, browser and all
that it draws share the processor.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import SHAPES
from bench.report import Report, count, parser, table
from bench.serve import served, tandem_command
from tandem.config.load import build_config, dump_config
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.metrics.answers import ROLLOUTS_FILE
from tandem.metrics.records import METRICS_FILE, json_line
from tandem.models.load import new_causal_lm
from tandem.models.save import save_model

WIDTHS = (1280, 390)
SPEEDS = {"reading": 40, "flinging": 200, "a screen per frame": 800}
"""Pixels per frame."""
LATE = 50.0
"""Milliseconds of a frame that a reader sees."""
_STEP_ROWS = 100
_TEXT = "A small bird wanted to see the other side of the sea, and so it flew for a day. "
_SCROLL = """
([pixels, frames]) => new Promise((done) => {
  const list = document.querySelector(".virtual"), times = [];
  let before = performance.now(), down = true;
  const frame = (now) => {
    times.push(now - before);
    before = now;
    const end = list.scrollHeight - list.clientHeight;
    if (list.scrollTop >= end - 1) down = false;
    if (list.scrollTop <= 0) down = true;
    list.scrollTop += down ? pixels : -pixels;
    if (times.length <= frames) requestAnimationFrame(frame); else done(times.slice(1));
  };
  requestAnimationFrame(frame);
})
"""


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every width and speed; returns what is written as JSON."""
    made = parser(__doc__, "rounds threads")
    made.add_argument("--rows", type=count, default=10_000, help="recorded answers")
    made.add_argument("--frames", type=count, default=600, help="of a round")
    options = made.parse_args(args)
    if options.tiny:
        options.rows, options.frames, options.rounds = 300, 20, 1
    report = Report(options)
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        write_run(run, Path(place) / "base", options.rows)
        with served(partial(tandem_command, run), options.threads) as (_, port):
            report.result["frames"] = _measure(f"http://127.0.0.1:{port}/", options, report)
    report.result["summary"] = {
        name: summarized(times) for name, times in report.result["frames"].items()
    }
    rows = [
        (name, *(f"{found[key]:.{digits}f}" for key, digits in _COLUMNS.items()))
        for name, found in report.result["summary"].items()
    ]
    caption = f"{options.rounds} rounds of {options.frames} frames over {options.rows} answers"
    report.console.print(table("page", caption, ("scrolling",), tuple(_COLUMNS), rows))
    return report.end()


_COLUMNS = {"frames": 0, "median ms": 1, "99 % ms": 1, "longest ms": 1, f"over {LATE:.0f} ms": 0}


def summarized(times: Sequence[float]) -> dict[str, float]:
    """Of frames' milliseconds: how many, the median, that of the slowest hundredth, the longest,
    and how many are late."""
    late = sum(time > LATE for time in times)
    hundredth = sorted(times)[int(0.99 * (len(times) - 1))]
    figures = (len(times), statistics.median(times), hundredth, max(times), late)
    return dict(zip(_COLUMNS, figures, strict=True))


def write_run(run: Path, base: Path, rows: int) -> None:
    """A run with so many recorded answers, of a tiny model that can be served."""
    tokenizer = build_tokenizer()
    shape = {**SHAPES["stories260k"], "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    save_model(new_causal_lm(config, 1), tokenizer, base)
    run.mkdir()
    values = {"actor_model": str(base), "output_dir": str(run), "data": ["x"]}
    text = dump_config(build_config(values, where="bench: "))
    (run / "config.yaml").write_text(text, encoding="utf-8")
    steps = range(1, 1 + -(-rows // _STEP_ROWS))
    metrics = [
        {"stage": "ppo", "step": step, "time": 1.7e9 + step, "values": {"reward": step / 10}}
        for step in steps
    ]
    (run / METRICS_FILE).write_text("".join(map(json_line, metrics)), encoding="utf-8")
    answers = [_answer(1 + row // _STEP_ROWS, row % _STEP_ROWS) for row in range(rows)]
    (run / ROLLOUTS_FILE).write_text("".join(map(json_line, answers)), encoding="utf-8")


def _answer(step: int, row: int) -> dict[str, Any]:
    tokens = (_TEXT * (1 + row % 5)).split(" ")
    return {
        "stage": "ppo", "step": step, "every": 1, "row": row, "group": row, "prompt_id": f"p{row}",
        "prompt": [{"role": "user", "content": f"Tell me story {row} of the bird."}],
        "text": " ".join(tokens), "length": len(tokens), "finished": row % 2, "kl": step / 50,
        "reward": step / 10 - row / 50, "tokens": tokens, "logprobs": [-1.0] * len(tokens),
        "ref_logprobs": [-1.1] * len(tokens),
    }  # fmt: skip


def _measure(address: str, options: Any, report: Report) -> dict[str, list[float]]:
    """Milliseconds of each frame, by width and speed."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("the bench must find chromium; it did not. apt-get install chromium")
    found: dict[str, list[float]] = {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 844})
            page.set_default_timeout(120_000)
            page.goto(f"{address}#/rollouts")
            page.locator(".row .chip").first.wait_for()
            assert f"{options.rows:,} answers" in page.locator("[role=status]").all_inner_texts()
            for speed, pixels in SPEEDS.items():
                name = f"{width} px, {speed}"
                found[name] = []
                for _ in range(options.rounds):
                    found[name] += page.evaluate(_SCROLL, [pixels, options.frames])
                report.print_line(f"{name}: {json.dumps(summarized(found[name]))}")
            page.close()
        browser.close()
    return found


if __name__ == "__main__":
    main()
