"""The page in a real browser, over a real server with tiny models. Skipped without chromium."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright.sync_api")

import uvicorn
from playwright.sync_api import sync_playwright

from tandem.metrics.answers import ROLLOUTS_FILE
from tandem.serve.app import make_app
from tandem.serve.service import ServeSettings, Service, load_settings
from tests.jsonl import read_jsonl, write_jsonl
from tests.serve.test_run_api import answer, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
PATIENCE = 120_000  # milliseconds; no test measures time
ROWS = 10_000


@pytest.fixture(scope="module")
def run(served_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models to talk to, with a PPO stage's records of ten thousand answers."""
    folder = tmp_path_factory.mktemp("page")
    records = write_run(folder / "records")
    shutil.rmtree(records / "checkpoints")
    shutil.copytree(served_run, folder / "run")
    for path in records.iterdir():
        if path.name != "config.yaml":
            shutil.copy(path, folder / "run" / path.name)
    write_jsonl(
        folder / "run" / ROLLOUTS_FILE, [answer(1 + n // 100, n % 100) for n in range(ROWS)]
    )
    return folder / "run"


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    """Of a server over that run."""
    with page_server(run) as address:
        yield address


@contextmanager
def page_server(run: Path, **more: Any) -> Iterator[str]:
    """The address of a page over a run."""
    settings = ServeSettings(str(run), slots=4, max_new_tokens=8, **more)
    service = Service(settings, load_settings(settings))
    config = uvicorn.Config(make_app(service), port=0, log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE / 1000
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(PATIENCE / 1000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """An empty tab; what the browser complains of, a blocked style say, fails the test."""
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.address = address
    yield page
    context.close()
    assert complaints == []


def test_two_models_answer_side_by_side_and_a_vote_is_kept_and_undone(page: Any, run: Path) -> None:
    page.goto(f"{page.address}#/chat")
    page.get_by_label("Blind").check()
    page.get_by_label("Your message").fill("Say <b>three</b> words.")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Left is better").wait_for()
    heads = page.locator(".answer .head b").all_inner_texts()
    assert heads == ["A", "B"]  # blind: no names yet
    facts = page.locator(".facts").all_inner_texts()
    assert all("reward" in fact and "KL" in fact and "tokens" in fact for fact in facts)
    assert not any("KL to" in fact for fact in facts)  # it would tell the stage
    page.get_by_label("Color tokens by").select_option("values")
    page.get_by_role("group", name="Tokens of").or_(page.locator(".tokens")).first.focus()
    page.keyboard.press("ArrowRight")
    assert "value" in page.locator(".readout").first.inner_text()
    page.get_by_role("button", name="Left is better").click()
    page.get_by_text("Voted: left").wait_for()
    assert all(" · " in head for head in page.locator(".answer .head b").all_inner_texts())
    facts = page.locator(".facts").all_inner_texts()
    assert all("KL to sft " in fact for fact in facts)
    (vote,) = map(json.loads, (run / "votes.jsonl").read_text("utf-8").splitlines())
    assert vote["verdict"] == "left"
    assert vote["blind"]
    assert vote["prompt"] == [{"role": "user", "content": "Say <b>three</b> words."}]
    page.goto(f"{page.address}#/votes")
    page.locator(".commandline").first.wait_for()
    assert "votes.jsonl" in page.locator(".commandline code").first.inner_text()
    page.get_by_role("button", name="Undo the vote").click()
    page.get_by_text("No votes yet").wait_for()
    assert (run / "votes.jsonl").read_text("utf-8") == ""


def chunks(*deltas: dict[str, Any]) -> str:
    """A stream of an answer, a token for each delta."""
    lines = []
    for delta in (*deltas, {}):
        token = {"token": "".join(delta.values()), "logprob": -1.0, "bytes": [], "top_logprobs": []}
        choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop",
                  "logprobs": {"content": [token] if delta else []}}  # fmt: skip
        lines.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
    return "".join(lines) + "data: [DONE]\n\n"


def test_thoughts_are_folded_and_votes_keep_them(page: Any, run: Path) -> None:
    asked: list[Any] = []

    def answered(route: Any) -> None:
        asked.append(route.request.post_data_json)
        words = [{"content": "Fo"}, {"content": "ur."}] if len(asked) % 2 else []
        thoughts = [{"reasoning_content": "Two and"}, {"reasoning_content": " two."}]
        route.fulfill(body=chunks(*thoughts, *words), content_type="text/event-stream")

    page.route("**/v1/chat/completions", answered)
    page.goto(f"{page.address}#/chat")
    page.get_by_label("Your message").fill("2+2?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Left is better").wait_for()
    first, second = page.locator("details.thoughts").all()
    assert (first.get_attribute("open"), second.get_attribute("open")) == (None, "")
    assert page.locator(".answer > .text").all_inner_texts() == [
        "Four.", "(no words: the thoughts have not ended)",
    ]  # fmt: skip
    first.locator("summary").click()
    assert first.locator("p").inner_text() == "Two and two."
    page.get_by_label("Color tokens by").select_option("logprobs")
    within = page.locator(".tokens details.thoughts").first
    assert within.get_attribute("open") == ""  # as the user left it
    assert within.locator(".token").all_inner_texts() == ["Two and", " two."]
    page.get_by_label("Color tokens by").select_option("")
    page.get_by_role("button", name="Rewrite").click()
    box = page.get_by_role("textbox", name="The answer as it should be")
    assert box.input_value() == "Four."
    box.fill("It is four.")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Voted: rewrite").wait_for()
    told = "<think>\nTwo and two.\n</think>\n\n"
    rows = read_jsonl(run / "votes.jsonl")
    assert [(row["chosen"], row["rejected"]) for row in rows] == [  # no words, no pair
        (f"{told}It is four.", f"{told}Four.")
    ]
    page.get_by_label("Your message").fill("Sure?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Left is better").wait_for()
    assert asked[-1]["messages"][1] == {
        "role": "assistant", "content": "It is four.", "reasoning_content": "Two and two.",
    }  # fmt: skip
    page.goto(f"{page.address}#/votes")
    page.get_by_role("button", name="Undo the vote").click()
    page.get_by_text("No votes yet").wait_for()


def test_what_chat_says_stays_in_chat_and_send_is_beside_the_box(page: Any) -> None:
    page.goto(f"{page.address}#/chat")
    message = page.get_by_label("Your message")
    message.fill("Hi")
    send = page.get_by_role("button", name="Send", exact=True)
    box, button = message.bounding_box(), send.bounding_box()
    assert box["x"] + box["width"] <= button["x"]
    assert box["y"] <= button["y"] < box["y"] + box["height"]
    send.click()
    page.get_by_text("The answers are complete.").wait_for()
    page.goto(f"{page.address}#/runs")
    page.locator("svg.chart").first.wait_for()
    assert page.locator("#status").inner_text() == ""


VIEWS = {
    "runs": "svg.chart",
    "rollouts": ".row",
    "rollouts?tab=prompt": ".timeline li",
    "rollouts?tab=compare": ".winrate",
    "data": ".counts li",
    "votes": ".card",
}


def test_every_view_shows_its_records_and_fits_a_phone(page: Any) -> None:
    for view, shown in VIEWS.items():
        page.goto(f"{page.address}#/{view}")
        page.locator(shown).first.wait_for()
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, view
    page.goto(f"{page.address}#/runs")
    page.locator(".alarm-mark").first.wait_for(state="attached")
    assert page.locator("figure", has_text="Reward against KL").count() == 1


def test_two_runs_are_overlaid_in_every_chart(page: Any, run: Path, tmp_path: Path) -> None:
    both = tmp_path / "runs"
    shutil.copytree(run, both / "first")
    write_run(both / "second", shift=2.0)
    with page_server(both / "first", runs=str(both)) as address:
        page.goto(f"{address}#/runs")
        chart = page.locator("figure", has_text="Held-out reward").first
        chart.locator("svg.chart").wait_for()
        lines_of_one = chart.locator("path").count()
        assert lines_of_one > 0
        page.get_by_role("checkbox", name="second").check()
        chart.get_by_text("second").wait_for()
        legend = chart.locator(".legend").all_inner_texts()
        assert all(name in " ".join(legend) for name in ("first", "second"))
        assert chart.locator("path").count() == 2 * lines_of_one
        ends = [
            float(text) for text in re.findall(r"(?:first|second)\D*([\d.]+)", " ".join(legend))
        ]
        assert ends == [6.0, 8.0]
        frontier = page.locator("figure", has_text="Reward against KL")
        assert "second" in frontier.inner_text()
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0


def test_what_could_not_be_read_of_a_run_is_said_also_while_it_runs(
    page: Any, run: Path, tmp_path: Path
) -> None:
    both = tmp_path / "runs"
    first = write_run(both / "first")
    second = write_run(both / "second")
    (second / "data.json").write_text("{", encoding="utf-8")
    with page_server(run, runs=str(both)) as address:
        page.goto(f"{address}#/runs?runs=second")
        page.locator(".notice").wait_for()
        assert page.locator(".notice").inner_text().startswith("data.json could not be read")
        page.get_by_role("checkbox", name="first").check()
        page.get_by_text("second: data.json could not be read").wait_for()
        assert page.locator(".notice").count() == 1
        with (first / "answers.jsonl").open("a", encoding="utf-8") as file:
            file.write("<i>damaged\n")
        metrics = first / "metrics.jsonl"
        further = json.loads(metrics.read_text("utf-8").splitlines()[-1])
        further["time"] += 1
        with metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(further) + "\n")
        page.get_by_text("first: answers.jsonl: 1 line cannot be read").wait_for()


_LABELS = """
() => {
  const chart = [...document.querySelectorAll("figure")].find((f) => f.innerText.includes("Reward against KL"));
  const place = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const all = (name) => [...chart.querySelectorAll(name)].map(place);
  return { labels: all(".tag"), dots: all("circle"), chart: place(chart.querySelector("svg")) };
}
"""  # noqa: E501


@pytest.mark.parametrize("width", [390, 1280])
def test_the_frontiers_labels_cover_nothing(
    page: Any, run: Path, tmp_path: Path, width: int
) -> None:
    crowded = tmp_path / "crowded"
    shutil.copytree(run, crowded)
    ends = [(0.0, 0.05), (0.82, 0.66), (1.1, 0.68), (1.06, 0.70), (1.15, 0.70)]
    metrics = [
        {"stage": "ppo", "step": n, "time": n, "values": {"heldout_reward": y, "heldout_kl": x}}
        for n, (x, y) in enumerate(ends, 38)
    ]
    write_jsonl(crowded / "metrics.jsonl", metrics)
    page.set_viewport_size({"width": width, "height": 844})
    with page_server(crowded) as address:
        page.goto(f"{address}#/runs")
        page.locator(".tag").nth(1).wait_for()
        found = page.evaluate(_LABELS)
    assert len(found["labels"]) == 2
    assert len(found["dots"]) == len(ends)
    for left, top, right, bottom in found["labels"]:
        assert found["chart"][0] <= left < right <= found["chart"][2]
        for x0, y0, x1, y1 in found["dots"]:
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            assert not (left < x < right and top < y < bottom)


@pytest.mark.parametrize(
    ("low", "high", "most", "found"),
    [
        (100, 100, 100, [90, 95, 100]),
        (93.5, 100, 100, [92, 94, 96, 98, 100]),
        (-180, 62, 100, [-200, -100, 0, 100]),
        (0, 0, 100, [0, 0.5, 1]),
        (0, 130, None, [0, 50, 100, 150]),
        (-0.1, 0.9, None, [-0.25, 0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_an_axis_ends_where_no_value_can_be(
    page: Any, low: float, high: float, most: float | None, found: list[float]
) -> None:
    page.goto(page.address)
    ticks = page.evaluate(
        "async (given) => (await import('/format.js')).ticks(...given, 4)"
        if most is None
        else "async ([low, high, most]) => (await import('/format.js')).ticks(low, high, 4, most)",
        [low, high] if most is None else [low, high, most],
    )
    assert ticks == pytest.approx(found)


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(12.25, 0.25, "12.25"), (-1500, 500, "−1,500"), (0.3, 0.1, "0.3"), (1e-17, 0.1, "0")],
)
def test_numbers_of_an_axis_have_the_decimals_of_its_steps(
    page: Any, value: float, step: float, text: str
) -> None:
    page.goto(page.address)
    told = "async (given) => (await import('/format.js')).tickText(...given)"
    assert page.evaluate(told, [value, step]) == text


def test_of_ten_thousand_answers_only_those_in_sight_exist(page: Any) -> None:
    page.goto(f"{page.address}#/rollouts")
    listed = page.get_by_role("listbox")
    page.get_by_text("10,000 answers").wait_for()
    listed.focus()
    page.keyboard.press("End")
    page.locator(f'.row[aria-posinset="{ROWS}"] .chip').first.wait_for()
    assert page.locator(".row").count() < 60
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 100, answer 98").wait_for()
    # What a model wrote is text, whatever it looks like.
    assert page.locator(".detail .token").first.inner_text() == "<b>"
    assert page.locator(".row b, .detail .turn b").count() == 0
    page.get_by_label("Search").fill("question 42")
    page.get_by_text("100 of 10,000 answers").wait_for()


@pytest.mark.parametrize(
    ("values", "told"),
    [("[0, 0]", "It is 0 for every token."), ("[0, 2]", "Full color at 2 nats."),
     ("[null]", "No token has one.")],
)  # fmt: skip
def test_the_scale_of_colors_is_told_where_there_is_one(page: Any, values: str, told: str) -> None:
    page.goto(f"{page.address}#/chat")
    made = f"tokenText(['a', 'b'], {{ kl: {values} }}, 'kl').innerText"
    text = page.evaluate(f"import('/tokens.js').then(({{ tokenText }}) => {made})")
    assert text.endswith(told)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_serious_fault(page: Any, scheme: str, width: int) -> None:
    axe_core = pytest.importorskip("axe_core_python", reason="pip install axe-core-python")
    axe = (Path(axe_core.__file__).parent / "axe.min.js").read_text("utf-8")
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    faults = []
    for view, shown in {**VIEWS, "chat": ".conversation"}.items():
        page.goto(f"{page.address}#/{view}")
        page.locator(shown).first.wait_for()
        if view == "chat":
            page.get_by_label("Color tokens by").select_option("kl")
            page.get_by_label("Your message").fill("Hi")
            page.get_by_role("button", name="Send", exact=True).click()
            page.get_by_role("button", name="Left is better").wait_for()
        if view == "rollouts":
            page.locator(".row").nth(1).click()
            page.locator(".detail .token").first.wait_for()
        page.evaluate(axe)  # by the debugger, which the page's policy does not bind
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 10
        faults += [
            (view, fault["id"], fault["impact"], fault["nodes"][0]["target"])
            for fault in found["violations"]
            if fault["impact"] in ("serious", "critical")
        ]
    assert faults == []
