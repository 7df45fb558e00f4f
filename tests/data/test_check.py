"""`tandem data check`: what it prints and how it exits."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from rich.console import Console
from transformers import AutoTokenizer

from tandem.config.schema import DataConfig
from tandem.data import render as render_room
from tandem.data.check import check
from tandem.data.check_command import data_command
from tandem.data.check_tokens import print_lengths
from tandem.errors import ConfigError, DataError, ModelError
from tests.data.built_tokenizers import byte_level
from tests.jsonl import write_jsonl

ROWS = [
    {"prompt": f"Question {i}?", "chosen": "a longer answer", "rejected": "short"}
    for i in range(19)
] + [{"prompt": "Last?", "chosen": "x", "rejected": "yy"}]


def run(data: list[str], color: bool = False, **options: Any) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=250, force_terminal=color, no_color=not color)
    code = check(DataConfig(), data, seed=1, console=console, **options)
    return code, out.getvalue()


def test_good_data_exits_with_0(tmp_path: Path) -> None:
    code, text = run([write_jsonl(tmp_path / "a.jsonl", ROWS)], rows=2)
    assert code == 0
    assert "a was read as: preference (20)" in text
    assert "Length bias: chosen is longer in 95.0% of 20 pairs (equal in 0.0%)." in text
    assert "user: Question 0?" in text
    assert "chosen: a longer answer" in text
    assert "Question 2?" not in text
    assert "shared between" not in text
    length = next(line for line in text.splitlines() if line.startswith("│ chosen"))
    cells = [cell.strip() for cell in length.strip("│").split("│")]
    assert cells == ["chosen", "20", "1", "15", "15", "15", "15", "15", "15", "15"]


def test_bad_rows_are_shown_and_exit_with_1(tmp_path: Path) -> None:
    bad = [{"prompt": "x", "chosen": "", "rejected": "b"}, {"messages": [{"role": "asst"}]}]
    code, text = run([write_jsonl(tmp_path / "a.jsonl", [*ROWS, *bad])])
    assert code == 1
    assert "dropped: chosen must not be blank" in text
    assert "a.jsonl:21" in text
    assert "dropped: messages must have role and content" in text


def test_the_first_bad_row_comes_with_what_to_do(tmp_path: Path) -> None:
    code, text = run([write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"q": "x", "good": "y"}])])
    assert code == 1
    shown = " ".join(text.replace("│", " ").split())
    assert "found columns q, good. Map its columns, as in FILE::prompt=question" in shown


def test_stages_without_rows_are_named_with_the_cause(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{i}?", "choosen": "a", "rejected": "b"} for i in range(20)]
    mistyped = [write_jsonl(tmp_path / "a.jsonl", rows)]
    code, text = run(mistyped, stages=["dpo"])
    assert code == 0
    assert (
        "a run of dpo would be refused: no row for dpo. All 20 usable rows of a are prompts "
        "alone: no stage reads their columns choosen, rejected. Map the answer's column, as in "
    ) in " ".join(text.split())
    one_prompt = [{"prompt": "Q?", "chosen": f"a{i}", "rejected": "b"} for i in range(20)]
    _, text = run([write_jsonl(tmp_path / "b.jsonl", one_prompt)])
    assert "a run of sft reward ppo would be refused: no row for reward and ppo.\n" in text
    _, text = run([write_jsonl(tmp_path / "c.jsonl", ROWS)])
    assert "would be refused" not in text


def test_rows_that_are_all_bad_have_no_lengths(tmp_path: Path) -> None:
    code, text = run([write_jsonl(tmp_path / "a.jsonl", [{"prompt": ""}])], stages=["ppo"])
    assert code == 1
    assert "a was read as: nothing usable" in text
    assert (
        "a run of ppo would be refused: no row for ppo. No row of a could be used (1 of 1" in text
    )
    assert "Lengths" not in text


def test_what_a_step_alone_would_get(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", ROWS)
    for stages, num_used in ((["sft"], 20), (["sft", "reward", "ppo"], 20), (["dpo"], 20)):
        text = run([data], stages=stages)[1]
        assert f"used: in a run of {' '.join(stages)} (one stage alone" in text
        row = next(line for line in text.splitlines() if line.startswith("│ a "))
        read, *used, unused, dropped = (int(cell) for cell in row.strip("│").split("│")[1:])
        assert (read, sum(used), unused, dropped) == (20, num_used, 0, 0)
        assert sum(count > 0 for count in used[:3]) == (3 if len(stages) == 3 else 1)


def test_labels_and_rankings_are_counted_and_labels_used_where_a_stage_reads_them(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"Q{i}?", "completion": "a", "label": i % 4 > 0} for i in range(20)]
    rows += [{"prompt": f"R{i}?", "ranking": ["a", "b", "c"]} for i in range(5)]
    data = [write_jsonl(tmp_path / "a.jsonl", rows)]
    code, text = run(data, stages=["kto"])
    assert code == 0
    assert "Labels: 15 good and 5 bad answers (75.0% good), which a stage on labelled" in text
    assert "Rankings: 5 of 3 answers." in text
    assert "a was read as: completion (20), ranking (5)" in text
    assert "no rejected answer" not in text
    _, of_pairs = run(data, stages=["dpo"])
    assert "no rejected answer" in of_pairs


def test_what_compares_answers_is_shown_as_a_column_map_with_what_is_left(tmp_path: Path) -> None:
    votes = [
        {"question": f"Q{i}?", "answer_0": "a", "answer_1": "b", "score_0": i % 4, "score_1": 0}
        for i in range(20)
    ]
    rated = [{"response": text, "overall_score": size} for size, text in enumerate("xyz")]
    rated.append({"response": "none", "overall_score": "N/A"})
    lists = [{"instruction": f"R{i}?", "completions": rated} for i in range(3)]
    data = [write_jsonl(tmp_path / "a.jsonl", votes), write_jsonl(tmp_path / "b.jsonl", lists)]
    code, text = run(data, stages=["reward"])
    assert code == 0
    assert (
        "a was read as: prompt with prompt=question (5), two answers with prompt=question,"
        "answer_a=answer_0,answer_b=answer_1 by score_0 and score_1 (15)"
    ) in text
    assert "note: a tie by score_0 and score_1, not compared: a prompt alone" in text
    assert (
        "b was read as: scored answers with prompt=instruction,answers=completions.response,"
        "scores=completions.overall_score (3)"
    ) in text
    assert "note: with an answer whose score is no number, left out of the ranking" in text
    assert "Rankings: 3 of 3 answers." in text


def test_shared_prompts_are_shown(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", ROWS)
    b = write_jsonl(tmp_path / "b.jsonl", [{"prompt": " question  3? "}, {"prompt": "New?"}])
    c = write_jsonl(tmp_path / "c.jsonl", [{"prompt": "Other?"}])
    assert "Prompts shared between a and b: 1, such as 'question 3?'." in run([a, b, c])[1]
    assert "Prompts shared between data sets: none." in run([a, c])[1]


def test_data_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07[bold]x[/bold]\u202e\r"
    name = "a\x1b[2J.jsonl"
    rows = [
        {"prompt": evil, "chosen": evil + "1", "rejected": evil + "2"},
        {"prompt": evil, "chosen": "", evil: evil},
        {evil: 1},
        {"messages": [{"role": evil, "content": evil}]},
    ]
    both = [write_jsonl(tmp_path / name, rows), write_jsonl(tmp_path / "b.jsonl", rows[:1])]
    code, text = run(both)
    assert code == 1
    assert "[bold]x[/bold]" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_tokens_are_counted_and_coloured(tmp_path: Path, shared: Path) -> None:
    folder = str(shared / "models" / "stories260K" / "hf")
    long = {"prompt": "long " * 600, "chosen": "\x1b[2Jno", "rejected": "b"}
    data = write_jsonl(tmp_path / "a.jsonl", [*ROWS, long, {"text": "Once."}])
    code, text = run([data], tokenizer_path=folder, rows=1)
    assert code == 0
    assert "a.jsonl:1 chosen:" in text
    assert "Lengths in tokens" in text
    assert "prompt: 1 of 21 (4.8%) are longer than max_prompt_tokens 256." in text
    assert "chosen: 1 of 21 (4.8%) are longer than max_tokens 512." in text
    assert "Human: Question 0?" in text
    assert "a longer answer</s>" in text
    _, colored = run([data], tokenizer_path=folder, rows=30, color=True)
    assert "\x1b[2m" in colored  # prompt dim
    assert "\x1b[32m" in colored  # learned green
    assert "\x1b[7;32m</s>" in colored  # the stop token reversed
    assert "\x1b[2J" not in colored


def test_rows_are_shown_in_a_template_of_ones_own(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path / "tokenizer")
    data = write_jsonl(
        tmp_path / "a.jsonl", [*ROWS, {"messages": [{"role": "user", "content": "x"}] * 2}]
    )
    out = io.StringIO()
    config = DataConfig(chat_template="none")
    options: dict[str, Any] = {"tokenizer_path": str(tmp_path / "tokenizer"), "rows": 1}
    console = Console(file=out, width=250, no_color=True)
    assert check(config, [data], seed=1, console=console, **options) == 1
    assert "\nQuestion 0?a longer answer<|endoftext|>" in out.getvalue()
    shown = out.getvalue()
    assert "rows that cannot be rendered: 1 of 21 measured, which are counted as used" in shown
    assert shown.index("rows that cannot be rendered") < shown.index("Lengths in characters")
    with pytest.raises(ConfigError, match=r"gone.jinja', which does not exist"):
        check(DataConfig(chat_template="gone.jinja"), [data], seed=1, console=console)


def test_rows_the_renderer_refuses_exit_with_1(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise DataError("a.jsonl:1: no template \x1b takes this")

    monkeypatch.setattr(render_room.Renderer, "prompt", refuse)
    code, text = run(
        [write_jsonl(tmp_path / "a.jsonl", ROWS)],
        tokenizer_path=str(shared / "models" / "stories260K" / "hf"),
    )
    assert code == 1
    assert "cannot be rendered: a.jsonl:1: no template \\x1b takes this" in text
    assert "rows that cannot be rendered: 20" in text


def test_a_tokenizer_that_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must be a folder or hub name that loads; got") as error:
        run([write_jsonl(tmp_path / "a.jsonl", ROWS)], tokenizer_path=str(tmp_path / "none"))
    assert "\n" not in str(error.value)


def test_a_hub_without_an_answer_is_asked_once_for_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, offline = [], []

    def no_answer(hub: HfApi, name: str, **options: Any) -> None:
        asked.append(name)
        raise OSError("no route to the hub")

    def not_cached(name: str, local_files_only: bool = False) -> None:
        offline.append(local_files_only)
        raise OSError("not in the cache")

    monkeypatch.setattr(HfApi, "model_info", no_answer)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", not_cached)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ModelError) as error:
        run([write_jsonl(tmp_path / "a.jsonl", ROWS)], tokenizer_path="my-modle")
    assert (asked, offline) == (["my-modle"], [True])
    assert str(error.value).startswith(
        "tokenizer my-modle must be a folder or hub name that loads; got no such folder, nothing "
        "in the hub's cache and no answer from https://"
    )
    assert str(error.value).endswith("(no route to the hub). Did you mean my-model?")
    with pytest.raises(ModelError, match=r"got OSError: not in the cache\. Check the path\."):
        run([write_jsonl(tmp_path / "a.jsonl", ROWS)], tokenizer_path="my-model")
    assert (asked, offline) == (["my-modle"], [True, False])


def test_rows_that_look_rendered_are_noted(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path / "tokenizer")
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": "<|im_start|>user\nHi<|im_end|>"}, *ROWS])
    code, text = run([data], tokenizer_path=str(tmp_path / "tokenizer"), rows=1)
    assert code == 0
    assert "note: the text spells control tokens <|im_end|>, <|im_start|>, encoded as" in text


def test_tokens_of_evenly_spaced_rows_are_counted(tmp_path: Path, shared: Path) -> None:
    tokenizer = str(shared / "tokenizers/smollm2")
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    _, text = run([path], tokenizer_path=tokenizer, measured=5, rows=2)
    assert "Tokens are those of 5 evenly spaced rows of 20, but max is also of the 15 rows" in text
    assert "a.jsonl:1 chosen" in text
    assert "a.jsonl:2 chosen" in text
    _, text = run([path], tokenizer_path=tokenizer, measured=0)
    assert "evenly spaced" not in text


def test_the_longest_row_is_measured_and_held_to_the_limits(tmp_path: Path, shared: Path) -> None:
    rows = [{"prompt": f"Question {i}?", "completion": "yes"} for i in range(200)]
    rows[133]["completion"] = "no " * 3000
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer = str(shared / "models" / "stories260K" / "hf")
    _, text = run([path], tokenizer_path=tokenizer, measured=10, rows=0, stages=["sft"])
    over = f"are longer than max_tokens 512 (--dataset.on-long-row); the first: {path}:134"
    told = f"limits: 0 of 10 evenly spaced rows (0.0%), and 1 of the 100 longest others, {over}"
    assert told in " ".join(text.split())
    assert text.index("limits: ") < text.index("Lengths in characters")
    line = next(
        line for line in text.split("Lengths in tokens")[1].splitlines() if "chosen" in line
    )
    cells = [int(cell) for cell in line.strip("│").split("│")[1:]]
    assert (cells[0], cells[-2] < 50, cells[-1] > 3000) == (10, True, True)
    _, text = run([path], tokenizer_path=tokenizer, rows=0, stages=["sft"])
    assert f"limits: 1 of 200 rows (0.5%) {over}\n" in text
    # As prompts they are all short enough.
    _, text = run([path], tokenizer_path=tokenizer, rows=0, stages=["grpo"])
    assert "limits: 200 rows are within max_prompt_tokens 256\n" in text
    assert "which --tokenizer MODEL counts" in run([path], rows=0)[1]


def test_flags_of_a_run_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)

    def told(*flags: str) -> str:
        assert data_command(["check", path, "--stages", "sft", "dpo", *flags]) == 0
        return capsys.readouterr().out

    own = told("--heldout", "0.3", "--data-split", "1,1,0", "--rows", "0")
    run_flags = ("--dataset.heldout=0.3", "--dataset.split", "1,1,0", "--rows", "0")
    assert told(*run_flags) == own
    assert told("--rows", "0") != own


@pytest.mark.parametrize(("width", "turned"), [(80, False), (40, True)])
def test_lengths_can_be_read_in_a_narrow_terminal(width: int, turned: bool) -> None:
    out = io.StringIO()
    lengths = {"prompt": range(100, 200), "chosen": range(1000, 1100)}
    print_lengths(Console(file=out, width=width), "tokens", lengths)
    lines = [re.findall(r"[\w%]+", line) for line in out.getvalue().splitlines()]
    assert (["part", "prompt", "chosen"] in lines) == turned
    assert (["max", "199", "1099"] in lines) == turned
    words = {word for line in lines for word in line}
    assert {"part", "rows", "min", "50%", "max", "prompt", "chosen", "199", "1099"} <= words
    assert "…" not in out.getvalue()
