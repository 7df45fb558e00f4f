import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from tandem.errors import CheckpointError
from tandem.metrics.report import write_report
from tests.jsonl import write_jsonl

from .runs import metrics_line

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{7*7}}\x1b\u202e\ud800"
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "footer"),
    *("div", "span", "p", "b", "br", "h1", "h2", "h3", "ul", "li", "nav", "a", "article"),
    *("pre", "wbr", "code"),
    *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "details", "summary"),
    *("caption", "svg", "path", "circle", "rect", "line", "text"),
}
VOID = {"meta", "br", "wbr"}


class Page(HTMLParser):
    """The elements, attributes and text of a page; checks that every element is closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.goes_on = False
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.goes_on = tag == "wbr"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.goes_on:  # one word, which a narrow column may break here
            data = self.texts.pop() + data
        self.texts.append(data)
        self.goes_on = False

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def report(path):
    html = write_report(path).read_text("utf-8")
    return html, Page(html)


def answers(**texts):
    return {label: {"text": t, "score": float(n)} for n, (label, t) in enumerate(texts.items())}


@pytest.fixture
def run(tmp_path):
    """A whole run: three stages, evaluation, ledger, alarms, samples."""
    lines = [metrics_line("sft", 0, heldout_perplexity=250.0)]
    for step in range(1, 41):
        lines.append(
            metrics_line(
                "sft", step, loss=3.0 / step, **{"seconds/step": 2.0, "seconds/train": 1.5}
            )
        )
    lines += [metrics_line("sft", 40, heldout_perplexity=8.0)]
    lines += [metrics_line("reward", n, accuracy=0.9, heldout_accuracy=0.875) for n in (1, 2)]
    lines += [metrics_line("ppo", n, reward=n / 2, heldout_reward=n / 4, kl=n) for n in (0, 1, 4)]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    (tmp_path / "config.yaml").write_text("actor_model: tiny\nsteps: [sft, reward, ppo]\nseed: 9\n")
    (tmp_path / "command.txt").write_text("tandem sft --seed 9\ntandem train --seed 9\n")
    (tmp_path / "environment.json").write_text(json.dumps({"torch": "2.13"}))
    ledger = {
        "name": "politeness",
        "path": "p.jsonl.gz",
        "rows": 1100,
        "blank_lines": 2,
        "duplicates": 0,
        "used": {"sft": 200, "reward": 400, "ppo": 0},
        "extra_copies": {"sft": 200},
        "unused": {"no rejected answer": 490},
        "dropped": {"too long (sft)": {"count": 10, "first": ["p.jsonl.gz:17"]}},
        "notes": {"system turn left out": 3},
    }
    (tmp_path / "data.json").write_text(json.dumps({"datasets": [ledger]}))
    evaluation = {
        "models": {
            "base": {"heldout_perplexity": 250.0, "heldout_reward": -1.0},
            "ppo": {"heldout_perplexity": 9.0, "heldout_reward": 1.25},
        },
        "answers": [
            {"prompt": f"Question {n}?", "answers": answers(base="No.", ppo="Gladly.")}
            for n in range(11)
        ],
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    alarm = {"alarm": "kl-high", "value": 30.0, "threshold": 25.0, "advice": "Raise it."}
    write_jsonl(tmp_path / "alarms.jsonl", [{"stage": "ppo", "step": 4, **alarm}])
    sample = {"prompt": "While training?", "answers": answers(**{"sample 1": "yes"})}
    write_jsonl(tmp_path / "samples.jsonl", [{"stage": "ppo", "step": 3, **sample}])
    return tmp_path


def test_the_page_shows_what_the_folder_holds(run):
    _, page = report(run)
    for shown in (
        "SFT model: held-out perplexity 8 250 before training",
        "Reward model: held-out accuracy 87.5 %",
        "PPO model: held-out reward 1 0 before training",
        "Total time of all stages 1 m 20 s",
        "Held-out reward -1 1.25",
        "kl-high ppo step 4 Raise it. 30; the threshold is 25",
        "Supervised fine-tuning 40 steps",
        "All metrics of this stage (4)",
        "Question 0? base 0 No. ppo 1 Gladly.",
        "3 more prompts",
        "ppo step 3 While training? sample 1 0 yes",
        "politeness p.jsonl.gz 1,100 200 sft 400 reward",
        "10 dropped: too long (sft) (p.jsonl.gz:17, …) 490 unused: no rejected answer",
        "2 blank lines 200 extra copies by weight in sft 3 system turn left out",
        "train 1 m 00 s 75 %",
        "other 20 s 25 %",
        "tandem sft --seed 9 tandem train --seed 9",
        "actor_model tiny empty seed 9 1234",
        "torch 2.13",
        "14 November 2023",
    ):
        assert shown in page.text, shown
    assert "Direct preference" not in page.text
    assert run.name in page.text
    charts = [v for t, name, v in page.attributes if (t, name) == ("svg", "aria-label")]
    assert "Loss, nats, over steps" in charts
    assert "KL to the reference, nats per answer, over steps" in charts
    # Question 0 to 10 once each, the best score of each marked.
    assert sum("Gladly" in text for text in page.texts) == 11
    assert [v for _, name, v in page.attributes if name == "class"].count("score best") == 11


def test_the_page_is_self_contained_and_runs_no_script(run):
    html, page = report(run)
    assert html.startswith("<!doctype html>")
    assert set(page.tags) <= ALLOWED
    assert not [a for a in page.attributes if a[1].startswith("on") or a[1] in ("src", "style")]
    links = [value for _, name, value in page.attributes if name == "href"]
    assert links
    anchors = {value for _, name, value in page.attributes if name == "id"}
    assert {link.removeprefix("#") for link in links} <= anchors
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert len(html) < 2 * 2**20


def test_the_policy_allows_the_pages_own_style_alone(run):
    html, page = report(run)
    policy = next(v for t, n, v in page.attributes if t == "meta" and n == "content")
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert html.count("<style>") == 1


def test_no_text_of_data_models_or_names_becomes_markup(tmp_path):
    run = tmp_path / "<img src=x onerror=alert(1)>"
    run.mkdir()
    names = {"loss": 1.0, EVIL: 2.0, f"heldout_accuracy/{EVIL}": 0.5, "seconds/train": 1.0}
    line = metrics_line("sft", 1, **names)
    write_jsonl(run / "metrics.jsonl", [line, {**line, "stage": EVIL}])
    evil_answers = {EVIL: {"text": EVIL, "score": EVIL}}
    write_jsonl(
        run / "samples.jsonl",
        [{"stage": EVIL, "step": EVIL, "prompt": EVIL, "answers": evil_answers}],
    )
    alarm = dict.fromkeys(("stage", "step", "alarm", "value", "threshold", "advice"), EVIL)
    write_jsonl(run / "alarms.jsonl", [alarm])
    dataset = {
        "name": EVIL,
        "path": EVIL,
        "rows": EVIL,
        "used": {EVIL: 1},
        "unused": {EVIL: 1},
        "dropped": {EVIL: {"count": 1, "first": [EVIL]}},
        "notes": {EVIL: 1},
    }
    (run / "data.json").write_text(json.dumps({"datasets": [dataset]}))
    models = {EVIL: {EVIL: 1.0, "loss": EVIL}}
    entry = {"prompt": EVIL, "answers": evil_answers}
    (run / "evaluation.json").write_text(json.dumps({"models": models, "answers": [entry]}))
    (run / "environment.json").write_text(json.dumps({EVIL: EVIL}))
    (run / "config.yaml").write_text(
        json.dumps({"actor_model": EVIL, "stages": [EVIL], EVIL: EVIL})
    )
    (run / "command.txt").write_text(EVIL.encode(errors="ignore").decode())
    html, page = report(run)
    assert set(page.tags) <= ALLOWED
    assert not [a for a in page.attributes if a[1].startswith("on") or a[1] in ("src", "style")]
    assert "{{7*7}}" in page.text
    assert not any(c in html for c in "\x1b\u202e\ud800")
    assert "\\x1b\\u202e\\ud800" in page.text


def test_an_empty_folder_says_so(tmp_path):
    _, page = report(tmp_path)
    assert "Nothing has been logged in this folder yet." in page.text
    assert "Alarms" not in page.text


@pytest.mark.parametrize(
    "left",
    [
        "metrics.jsonl",
        "evaluation.json",
        "data.json",
        "samples.jsonl",
        "config.yaml",
        "alarms.jsonl",
    ],
)
def test_any_one_file_is_enough(run, left):
    for path in run.iterdir():
        if path.name != left:
            path.unlink()
    _, page = report(run)
    assert page.tags.count("section") >= 1


def test_reliability_and_the_best_of_n_have_their_tables(run):
    evaluation = json.loads((run / "evaluation.json").read_text())
    _, before = report(run)
    evaluation["reliability"] = [{"confidence": 0.6, "accuracy": 0.5, "pairs": 4}]
    points = [{"n": n, "kl": kl, "mean_reward": n / 4} for n, kl in ((1, 0.0), (2, 0.193))]
    evaluation["best_of_n"] = {"base": points, EVIL: points}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    _, page = report(run)
    assert "Best of n" not in before.text
    assert "by confidence" not in before.text
    assert "share right 4 0.6 0.5" in page.text
    assert "1 0 0.25 0.25 2 0.193 0.5 0.5" in page.text
    assert set(page.tags) <= ALLOWED


def test_means_over_several_answers_are_told_from_those_over_one(run):
    _, before = report(run)
    (run / "config.yaml").write_text("sampling: {samples_per_prompt: 4}\nstages: [sft, ppo]\n")
    _, page = report(run)
    assert "answered each held-out prompt once" not in before.text
    assert "answered each held-out prompt once" in page.text
    assert "4 answers to each" in page.text


def test_a_run_stopped_early_names_what_has_not_run(run):
    write_jsonl(run / "metrics.jsonl", [metrics_line("sft", 3, loss=1.0)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "st')
    (run / "alarms.jsonl").unlink()
    _, page = report(run)
    assert "sft 3 steps reward not run ppo not run" in page.text
    assert "No alarm was raised." in page.text


@pytest.mark.parametrize("strange", [None, 3, "x", [], {}, [None], {"a": None}, [[1]], True])
def test_files_of_an_unexpected_shape_do_no_harm(tmp_path, strange):
    (tmp_path / "data.json").write_text(json.dumps({"datasets": strange}))
    evaluation = {"models": {"a": strange}, "answers": [{"prompt": strange, "answers": strange}]}
    evaluation |= {"reliability": strange, "best_of_n": {"a": strange, "b": [strange]}}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    write_jsonl(tmp_path / "samples.jsonl", [{"answers": {"a": strange}}])
    write_jsonl(tmp_path / "alarms.jsonl", [{"alarm": strange, "value": strange}])
    dataset = dict.fromkeys(("used", "unused", "dropped", "blank", "rows", "notes"), strange)
    (tmp_path / "config.yaml").write_text(json.dumps({"steps": strange, "ppo": strange}))
    report(tmp_path)
    (tmp_path / "data.json").write_text(json.dumps({"datasets": [dataset]}))
    report(tmp_path)


def test_a_stage_without_a_finite_number_still_has_its_table(tmp_path):
    write_jsonl(tmp_path / "metrics.jsonl", [metrics_line("ppo", 1, reward="nan", kl="inf")])
    html, page = report(tmp_path)
    assert "Reward reward normalized reward nan nan nan nan" in page.text
    assert '<svg class="chart"' not in html


def test_a_damaged_file_is_named_on_the_page(run):
    (run / "data.json").write_text("{oops")
    _, page = report(run)
    assert "data.json could not be read" in page.text
    assert "Supervised fine-tuning" in page.text


def test_the_ledger_that_data_writes_is_shown(tmp_path):
    ledger = pytest.importorskip("tandem.data.ledger")
    account = ledger.Ledger()
    entry = account.open("hh", "hh.jsonl.gz", weight=2.0)
    entry.rows = 1234
    entry.use("sft", times=2)
    entry.leave("no place")
    (tmp_path / "data.json").write_text(account.to_json())
    _, page = report(tmp_path)
    assert "hh hh.jsonl.gz 1,234 1 sft 1 unused: no place 1 extra copies by weight" in page.text


def test_a_long_run_stays_a_small_page(tmp_path):
    lines = [
        metrics_line("ppo", step, reward=step % 17, kl=step % 5, entropy=1.0, policy_loss=0.1)
        for step in range(1, 5001)
    ]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    html, _ = report(tmp_path)
    assert len(html) < 200_000


def test_there_must_be_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="run folder must exist"):
        write_report(tmp_path / "gone")


def recorded(step, reward, text="hm"):
    asked = {"prompt_id": "a1", "prompt": [{"role": "user", "content": "Followed?"}]}
    answer = {"text": text, "reward": reward, "kl": 1.0, "length": 2, "finished": 1}
    return {"stage": "ppo", "step": step, "every": 1, **asked, **answer}


def test_recorded_answers_are_shown_over_training(run):
    write_jsonl(run / "followed.jsonl", [recorded(n, n / 2, f"say {n}") for n in (0, 2, 4, 6, 8)])
    numbers = {"length": [3, 9], "kl": [0.0, 4.0], "finished": [1, 0]}
    advantage = {"low": -1, "high": 1, "counts": [3, 1]}
    lines = [
        {"stage": "ppo", "step": n, "every": 1, "reward": [0.0, n], "advantage": advantage}
        for n in (1, 2, 8)
    ]
    write_jsonl(run / "answers.jsonl", [{**line, **numbers} for line in lines])
    metrics = [metrics_line("ppo", n, heldout_kl=n, heldout_reward=n / 8) for n in (0, 4, 8)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in metrics)
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["scores"] = {"base": [0, 0, 1, None], "ppo": [1, 1, 1, 1]}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    _, page = report(run)
    for shown in (
        "ppo base 2 1 0 83% (31% to 98%)",
        "PPO at step 8 PPO at step 0 1 0 0 100% (21% to 100%)",
        "Reward of answers, step 1 mean 0.5, standard deviation 0.5",
        "Advantages, step 8 4 tokens",
        "PPO, held-out answers",
        "PPO Followed? step 0 0 say 0 step 4 2 say 4 step 8 4 say 8",
    ):
        assert shown in page.text, shown
    assert page.text.count("as the update reads them") == 2  # whitened: no reward units
    assert "reward units" not in page.text.partition("Distributions")[2].partition("Followed?")[0]
    charts = [v for t, name, v in page.attributes if (t, name) == ("svg", "aria-label")]
    assert charts.count("Reward against KL") == 1
    assert charts.count("Length of answers") == 2  # of the first and the last step alone


def test_a_followed_answer_without_a_score_is_shown_without_one(run):
    rewards = ("nan", None, 1.0)
    write_jsonl(run / "followed.jsonl", [recorded(n, r, f"say {n}") for n, r in enumerate(rewards)])
    _, page = report(run)
    assert "PPO Followed? step 0 say 0 step 1 say 1 step 2 1 say 2" in page.text


def test_recorded_answers_of_an_unexpected_shape_do_no_harm(run):
    strange = [
        {"stage": "ppo", "step": "one", "prompt_id": 3, "prompt": "x", "reward": {}},
        {"stage": "ppo", "step": 2, "prompt_id": [], "prompt": [1], "reward": "inf", "text": 5},
        {"stage": "ppo", "step": 3, "reward": [None, {}, "nan", 1e308, -1e308], "length": 4,
         "advantage": {"low": 1, "high": "x", "counts": 7}},
    ]  # fmt: skip
    for name in ("answers.jsonl", "followed.jsonl"):
        write_jsonl(run / name, strange)
    with (run / "followed.jsonl").open("a") as file:
        file.write('<script>alert(1)</script>\n{"stage": "ppo"}\n')
    html, _ = report(run)
    assert "<script" not in html
    assert "followed.jsonl:4 must be one JSON object" in html
