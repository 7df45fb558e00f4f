"""Escape sequences, bidirectional controls and markup from data, models and file names: shown,
never acted on, in the console, the chat, the data check, the tables, the line files and the report.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from tandem.config.schema import DataConfig, RunConfig, SamplingConfig
from tandem.data.check import check
from tandem.data.render import Renderer
from tandem.metrics.console import StageConsole
from tandem.metrics.log import MetricLog
from tandem.metrics.report import write_report
from tandem.serve import chat as serve
from tandem.training.comparing.eval_command import show_comparison
from tests.battery.figures import record
from tests.jsonl import write_jsonl
from tests.tiny import save_tiny_model, tiny_tokenizer

ESCAPES = (
    "\x1b[2J\x1b[H", "\x1b[31;1mred\x1b[0m", "\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x07",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\", "\x1bP1$r\x1b\\", "\x1b_G\x1b\\",
    "\x9b2J", "\x9d52;c;ZXZpbA==\x9c", "\x90", "\x1bc", "\x1b[6n", "\x1b[?1049h", "\x0e", "\x0f",
    "\x05", "\x07", "\x08\x08\x08", "\x0b", "\x0c", "\x7f", "\x00", "\x85", "safe\rEVIL",
    "\u202egpj.exe", "\u2066\u2067\u2068\u2069", "\u200e\u200f\u061c", "\u2028\u2029", "\ufeff",
    "\u200b\u2060\u00ad", "\U000e0041\U000e007f", "\ufff9\ufffb", "\ud800",
)  # fmt: skip
MARKUP = (
    "<script>alert(1)</script>", "</style><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\" onmouseover=\"alert(1)", "' autofocus onfocus='alert(1)", "<svg/onload=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>", "<iframe srcdoc='<script>1</script>'>", "]]><x>",
    "<!--", "-->", "<meta http-equiv=refresh content='0;url=//evil'>", "{{ 7 * 7 }}", "{% raw %}",
    "<base href=//evil>", "<link rel=stylesheet href=//evil>", "&lt;script&gt;", "<plaintext>",
    "\x00<script>", "<scr\x00ipt>", "＜script＞", "<style>*{display:none}</style>",
    "[bold red]x[/]",
)  # fmt: skip
# What may reach a terminal: text, line breaks, tabs and (from rich itself) colours.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def hostile(random: Random) -> str:
    """Words with escapes and markup among them."""
    parts = random.choices([*ESCAPES, *MARKUP, "word", " ", "\n", "\t", "日本"], k=8)
    return "".join(["begin ", *parts, " end"])


def texts(num: int, seed: int = 0) -> list[str]:
    """Each escape and each piece of markup alone, and mixtures."""
    random = Random(seed)
    return [*ESCAPES, *MARKUP, *(hostile(random) for _ in range(num))]


def assert_harmless(shown: str, *, styled: bool = False) -> None:
    """Nothing in `shown` acts on a terminal; of styles only rich's own may be there."""
    found = _RAW.search(_STYLE.sub("", shown) if styled else shown)
    assert found is None, f"raw {found.group()!r} in {shown[:500]!r}"


def test_console_samples_and_alarms() -> None:
    for text in texts(200):
        out = io.StringIO()
        console = StageConsole("ppo", 10, 0, Console(file=out, highlight=False, soft_wrap=True))
        console.sample(1, text, {text: {"text": text, "score": 0.5}})
        console.close()
        assert_harmless(out.getvalue())


def test_lines_of_files_hold_nothing_that_acts_on_a_terminal(tmp_path: Path) -> None:
    with MetricLog(tmp_path, "sft", 10, tensorboard=False, console=False) as log:
        for text in texts(50):
            log.sample(1, text, {"sft": {"text": text, "score": None}})
    raw = (tmp_path / "samples.jsonl").read_text("utf-8")
    assert_harmless(raw)
    lines = [json.loads(line) for line in raw.split("\n") if line]
    assert [line["prompt"] for line in lines] == texts(50)


def test_the_comparison() -> None:
    out = io.StringIO()
    answers = [{"prompt": t, "answers": {"sft": {"text": t, "score": 1.0}}} for t in texts(50)]
    show_comparison({"models": {"sft": {"x": 1.0}}, "answers": answers}, Console(file=out))
    assert_harmless(out.getvalue())


def test_the_data_check(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(folder)
    file = tmp_path / "a\x1b[31m\u202eb.jsonl"
    rows = [{"prompt": t, "chosen": "a" + t, "rejected": "b", t: t} for t in texts(50)]
    rows += [{"role": t} for t in texts(5)]
    write_jsonl(file, rows)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    config = DataConfig(on_bad_row="drop")
    for tokenizer in ("", str(folder)):
        check(config, [str(file)], seed=1, tokenizer_path=tokenizer, rows=500, console=console)
    assert_harmless(out.getvalue(), styled=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_the_chat_prints_nothing_that_acts_on_a_terminal(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    queue = iter(texts(50))

    def answer(talk: serve.Conversation) -> Iterator[str]:
        text = talk.turns[-1].content
        yield from text  # as a stream: an escape comes in pieces
        yield text

    monkeypatch.setattr(serve.Conversation, "answer", answer)
    said: list[str] = []

    def read(prompt: str) -> str:
        try:
            return next(queue)
        except StopIteration:
            raise EOFError from None

    assert serve.chat(model, SamplingConfig(), read=read, write=said.append) == 0
    assert_harmless("".join(said))
    renderer = Renderer(tiny_tokenizer())
    talk = serve.Conversation(None, renderer, SamplingConfig())  # type: ignore[arg-type]
    for text in texts(50):
        for command in ("/", "/save ", "/set ", "/save /nowhere/"):
            if "\0" in text or "\ud800" in text or command == "/save ":
                continue
            serve._turn(talk, command + text, said.append)
    assert_harmless("".join(said))


class _Page(HTMLParser):
    """Collects what a page would run or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "iframe", "object", "embed", "base", "link", "img", "form"}:
            self.acts.append(tag)
        for name, value in attrs:
            outside = (
                (value or "").strip().lower().startswith(("http", "//", "javascript:", "data:"))
            )
            if name.startswith("on") or name == "srcdoc" or (name in {"href", "src"} and outside):
                self.acts.append(f"{tag} {name}={value}")


def _hostile_run(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    safe = text.encode("utf-8", errors="replace").decode()
    (folder / "config.yaml").write_text(
        json.dumps({"actor_model": safe, safe: safe, "stages": [safe]})
    )
    (folder / "command.txt").write_text(f"tandem train {safe}\n")
    (folder / "environment.json").write_text(json.dumps({text: text}))
    dataset = {
        "name": text,
        "path": text,
        "rows": 1,
        "dropped": {text: {"count": 1, "first": [text]}},
    }
    (folder / "data.json").write_text(json.dumps({"datasets": [dataset], text: text}))
    answers = {text: {"text": text, "score": 1.0}}
    (folder / "evaluation.json").write_text(
        json.dumps({"models": {text: {text: 1.0, "loss": text}},
                    "answers": [{"prompt": text, "answers": answers}]})
    )  # fmt: skip
    lines = {
        "metrics": {"stage": "sft", "step": 1, "time": 1.7e9, "values": {text: 1.0, "loss": 2.0}},
        "samples": {"stage": text, "step": text, "prompt": text, "answers": answers},
        "alarms": {"stage": text, "step": 1, "alarm": text, "value": 1, "threshold": 2,
                   "advice": text},
    }  # fmt: skip
    for name, line in lines.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")


def _assert_report_harmless(folder: Path, text: str) -> None:
    _hostile_run(folder, text)
    page = write_report(folder).read_text("utf-8")
    assert_harmless(page)
    parser = _Page()
    parser.feed(page)
    assert not parser.acts, (text, parser.acts)
    policy = re.search(r"Content-Security-Policy\" content=\"([^\"]*)\"", page)
    assert policy is not None
    assert "default-src 'none'" in policy.group(1)


@pytest.mark.parametrize("text", [*MARKUP, *ESCAPES])
def test_the_report_holds_hostile_text_harmlessly(text: str, tmp_path: Path) -> None:
    _assert_report_harmless(tmp_path / "run", text)


def test_the_report_of_a_run_with_a_hostile_name(tmp_path: Path) -> None:
    _assert_report_harmless(tmp_path / "a<script>\x1b[31m\u202e&\"'b", "x")


@pytest.mark.slow
def test_reports_of_mixtures(tmp_path: Path) -> None:
    for number, text in enumerate(texts(250)):
        _assert_report_harmless(tmp_path / str(number), text)
    record("hostile texts in the report", pages=number + 1, raw_controls=0, active_elements=0)


def test_config_names_are_escaped_in_yaml() -> None:
    from tandem.config.load import dump_config

    for text in texts(20):
        if "\ud800" not in text:
            assert_harmless(dump_config(RunConfig(actor_model=text)))
