"""A run's models evaluated on other data: the numbers, what is told of rows, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tandem.cli import main
from tandem.config.schema import RunConfig
from tandem.data.dataset import load_data
from tandem.data.reading.folder_files import files_of_folder
from tandem.training.comparing.eval_command import evaluate_run
from tandem.training.stage_data import prepare_rows
from tests.jsonl import read_jsonl, write_jsonl
from tests.tiny import tiny_config, write_preferences
from tests.training.runs import ran


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> RunConfig:
    """A run of all three stages, which tests only add to."""
    folder = tmp_path_factory.mktemp("other") / "run"
    config = tiny_config(folder, tiny_model, preferences, ppo__eval_prompts=100)
    ran(config)
    return config


def record_of(config: RunConfig, name: str) -> dict[str, Any]:
    (file,) = Path(config.output_dir, "evaluations").glob(f"{name}-*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_the_held_out_rows_as_a_file_of_their_own_give_the_same_numbers(
    tmp_path: Path, finished: RunConfig, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(finished.output_dir, "evaluation.json")
    before = own.read_bytes()
    data = load_data(finished.dataset, finished.data, seed=finished.seed)
    lines = read_jsonl(preferences)
    file = write_jsonl(tmp_path / "again.jsonl", [lines[s.source.line - 1] for s in data.heldout])
    assert main(["eval", finished.output_dir, "--data", file]) == 0
    told = capsys.readouterr().out
    recorded, record = json.loads(before), record_of(finished, "again")
    for name in ("models", "scores", "answers", "reliability"):
        assert record[name] == recorded[name], name
    count = len(data.heldout)
    assert count > 3
    assert record["evaluated"] == {
        "texts": count, "prompts": count, "pairs": count, "graded answers": 0
    }  # fmt: skip
    (account,) = record["data"]
    known = {name: account[name] for name in ("name", "path", "rows", "used", "begin_like_trained")}
    assert known == {
        "name": "again", "path": file, "rows": count, "used": count, "begin_like_trained": 0
    }  # fmt: skip
    assert f"On {count} rows of again" in told
    assert own.read_bytes() == before, "the run's own record stays"
    assert f"On {count} rows of {file}" in Path(finished.output_dir, "report.html").read_text()
    made = files_of_folder(Path(finished.output_dir)).made
    assert any(path.parent.name == "evaluations" for path in made), "a record is no data"


def test_numbers_on_a_new_file_are_those_of_a_slow_loop_over_hf_s_own_models(
    tmp_path: Path, finished: RunConfig
) -> None:
    folder = Path(finished.output_dir)
    file = write_preferences(tmp_path / "new.jsonl", 9, seed=11)
    models = evaluate_run(str(folder), 0, data=[file])["models"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "sft")
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    policy = AutoModelForCausalLM.from_pretrained(folder / "sft").eval()
    wins, margins, loss, tokens = 0, 0.0, 0.0, 0
    for row in read_jsonl(file):
        turns = row["prompt"] if isinstance(row["prompt"], list) else [
            {"role": "user", "content": row["prompt"]}
        ]  # fmt: skip
        prompt = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        scores = []
        for side in ("chosen", "rejected"):
            answer = tokenizer(row[side], add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            with torch.no_grad():
                scores.append(float(judge(ids).logits))
                if side == "chosen":
                    logprobs = policy(ids).logits[0].log_softmax(dim=-1)
                    for place in range(len(prompt), ids.shape[1]):
                        loss -= float(logprobs[place - 1, ids[0, place]])
                        tokens += 1
        wins += scores[0] > scores[1]
        margins += scores[0] - scores[1]
    assert models["reward model"]["heldout_accuracy"] == pytest.approx(wins / 9)
    assert models["reward model"]["heldout_margin"] == pytest.approx(margins / 9, abs=1e-5)
    assert models["sft"]["heldout_loss"] == pytest.approx(loss / tokens, rel=1e-5)


def test_rows_that_the_run_trains_on_are_counted_and_evaluated(
    tmp_path: Path, finished: RunConfig, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_data(finished.dataset, finished.data, seed=finished.seed)
    lines = read_jsonl(preferences)
    trained = [share[0].source.line for share in (data.texts, data.pairs, data.prompts)]
    alike = [{**lines[line - 1], "chosen": "Another answer."} for line in trained]
    held_out = lines[data.heldout[0].source.line - 1]
    file = write_jsonl(tmp_path / "mixed.jsonl", [*alike, held_out])
    evaluate_run(finished.output_dir, 0, data=[file])
    told = capsys.readouterr().out
    assert f"begins like a row that the run trains on: 3 (the first: {file}:1)" in told
    record = record_of(finished, "mixed")
    assert record["data"][0]["begin_like_trained"] == 3
    assert (record["evaluated"]["texts"], record["trained_on_unknown"]) == (4, "")
    page = Path(finished.output_dir, "report.html").read_text()
    assert "rows (begins like a row that the run trains on): 3" in page


def test_what_is_not_known_of_the_rows_trained_on_is_told(
    tmp_path: Path, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_preferences(tmp_path / "own.jsonl")
    config = tiny_config(tmp_path / "run", tiny_model, own, stages=["sft"])
    ran(config)
    new = write_preferences(tmp_path / "new.jsonl", 4, seed=5)
    every = read_jsonl(own)
    write_jsonl(tmp_path / "own.jsonl", every[:-1])
    evaluate_run(config.output_dir, 0, data=[new])
    start = "note: of the rows that the run trained on not all are known: "
    told = capsys.readouterr().out
    assert f"{start}sft trained on other rows than its config.yaml names now\n" in told
    (tmp_path / "own.jsonl").unlink()
    evaluate_run(config.output_dir, 2, data=[new])
    assert f"{start}its own data cannot be read: " in capsys.readouterr().out


def test_all_rows_are_evaluated_and_those_of_no_model_counted(
    tmp_path: Path, tiny_model: str, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["reward"], dataset__eval_rows=2,
        dataset__columns=["prompt=prompt"], dataset__on_bad_row="drop",
    )  # fmt: skip
    config = replace(config, actor_model="", reward_model=tiny_model)
    ran(config)
    new = write_preferences(tmp_path / "new.jsonl", 5, seed=5)
    more = [*read_jsonl(new), {"text": "Some text."}, {"question": "one", "answer": "two"}, 7]
    new = write_jsonl(tmp_path / "new.jsonl", more)
    capsys.readouterr()
    evaluation = evaluate_run(config.output_dir, 0, data=[new])
    assert evaluation["evaluated"] == {"pairs": 5, "graded answers": 0}
    assert evaluation["without_number"] == 2
    assert sum(evaluation["data"][0]["dropped"].values()) == 1
    told = capsys.readouterr().out
    assert (
        "note: 2 rows without a number: too long, or for no model of the run, which has a rew"
        in told
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "rows (could not be read): 1" in page
    assert "rows (gave no number): 2" in page
    texts = write_jsonl(tmp_path / "texts.jsonl", more[5:7])
    assert main(["eval", config.output_dir, "--data", texts]) == 2
    assert capsys.readouterr().err == (
        f"tandem: --data must have rows for a model of {config.output_dir}, which has a reward "
        "model (pairs, graded answers); got none among 2 rows of texts. Give rows that it reads.\n"
    )


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("nowhere.jsonl", "nowhere.jsonl"),
        ("empty.jsonl", "empty.jsonl"),
        ("bad.jsonl", "bad.jsonl:2"),
        ("new.jsonl::prompt=that", "that"),
        ("new.jsonl:2", "--data must be without weights, as each row is evaluated once; got 2 for"),
    ],
)
def test_data_that_cannot_be_read_are_refused_in_one_line(
    named: str,
    told: str,
    tmp_path: Path,
    finished: RunConfig,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_preferences(tmp_path / "new.jsonl", 3, seed=5)
    write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}, 7])
    (tmp_path / "empty.jsonl").write_text("")
    folder = Path(finished.output_dir)
    before = sorted(folder.rglob("*"))
    assert main(["eval", finished.output_dir, "--data", named]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert sorted(folder.rglob("*")) == before


def test_a_number_of_prompts_leaves_records_and_report_as_they_are(
    tmp_path: Path, finished: RunConfig
) -> None:
    folder = Path(finished.output_dir)
    new = write_preferences(tmp_path / "few.jsonl", 6, seed=15)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    evaluation = evaluate_run(str(folder), 2, data=[new])
    assert [len(scores) for scores in evaluation["scores"].values()] == [2, 2, 2]
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_a_run_s_own_texts_to_mix_in_are_no_other_data(
    tmp_path: Path, finished: RunConfig, preferences: str
) -> None:
    mixing = replace(finished, ppo=replace(finished.ppo, ptx_data=(preferences,)))
    folder = tmp_path / "mixing"
    ran(replace(mixing, output_dir=str(folder), stages=("sft", "ppo"),
                reward_model=str(Path(finished.output_dir, "reward"))))  # fmt: skip
    new = write_jsonl(tmp_path / "new.jsonl", read_jsonl(preferences)[:20])
    evaluation = evaluate_run(str(folder), 0, data=[new])
    assert evaluation["evaluated"]["texts"] == 20
    (account,) = evaluation["data"]
    rows = prepare_rows(
        replace(mixing, stages=("sft", "ppo")), mixing.actor_model, mixing.actor_model
    )
    mixed = {row.source.line for row in rows.ptx} & set(range(1, 21))
    assert account["begin_like_trained"] >= len(mixed) > 0


def test_texts_to_mix_in_that_a_model_of_their_grades_leaves_out_are_not_trained_on(
    tmp_path: Path, tiny_model: str, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"Say {i}.", "completion": str(i), "score": i % 2} for i in range(20)]
    graded = write_jsonl(tmp_path / "graded.jsonl", rows)
    config = tiny_config(tmp_path / "run", tiny_model, preferences, ppo__ptx_data=[graded])
    ran(config)
    capsys.readouterr()
    new = write_jsonl(tmp_path / "new.jsonl", [{"prompt": "Say 4.", "completion": "another"}])
    evaluation = evaluate_run(config.output_dir, 0, data=[new])
    assert evaluation["trained_on_unknown"] == ""
    assert evaluation["data"][0]["begin_like_trained"] == 0


def test_other_models_are_compared_on_the_run_s_rows(
    tmp_path: Path, finished: RunConfig, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(finished.output_dir)
    lora = tiny_config(tmp_path / "lora", tiny_model, finished.data[0], stages=["sft"])
    adapted = ran(replace(lora, lora=replace(lora.lora, rank=2)))
    twin = Path(shutil.copytree(folder / "sft", tmp_path / "sft"))
    recorded = json.loads((folder / "evaluation.json").read_text())
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    adapter = str(adapted / "sft" / "adapter")
    found = evaluate_run(str(folder), 0, models=[str(twin), adapter])
    models = found["models"]
    assert list(models) == ["base", "sft", "ppo", "sft-2", "adapter", "reward model"]
    assert models["sft-2"] == models["sft"] == recorded["models"]["sft"]
    merged = evaluate_run(str(folder), 0, models=[str(adapted / "sft")])["models"]["sft-2"]
    assert models["adapter"]["heldout_loss"] == pytest.approx(merged["heldout_loss"], rel=1e-5)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    assert "sft-2" in capsys.readouterr().out


def test_a_model_s_column_is_called_as_its_folder_is(
    tmp_path: Path, finished: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(finished.output_dir)
    twin = shutil.copytree(folder / "sft", tmp_path / "a[b]")
    evaluate_run(str(folder), 1, models=[str(twin)])
    told = capsys.readouterr().out
    figures, answers = told.split("On held-out rows")[1].split("answer ", 1)
    assert "a[b] ┃" in figures
    assert "│ a[b] " in answers


def test_another_reward_model_scores_and_is_measured_in_place_of_the_run_s(
    tmp_path: Path, finished: RunConfig, tiny_model: str, preferences: str
) -> None:
    other = tiny_config(tmp_path / "other", tiny_model, preferences, stages=["reward"],
                        reward__learning_rate=1e-2, seed=5)  # fmt: skip
    judge = str(ran(other) / "reward")
    data = load_data(finished.dataset, finished.data, seed=finished.seed)
    lines = read_jsonl(preferences)
    file = write_jsonl(tmp_path / "again.jsonl", [lines[s.source.line - 1] for s in data.heldout])
    by_it = evaluate_run(finished.output_dir, 0, reward_model=judge)
    its_own = evaluate_run(other.output_dir, 1, data=[file])
    assert by_it["models"]["reward model"] == its_own["models"]["reward model"]
    own = json.loads(Path(finished.output_dir, "evaluation.json").read_text())
    assert by_it["models"]["sft"]["heldout_loss"] == own["models"]["sft"]["heldout_loss"]
    assert by_it["scores"]["sft"] != own["scores"]["sft"]
    also = evaluate_run(finished.output_dir, 0, reward_model=judge, data=[file])
    assert also["models"] == by_it["models"]


def test_models_that_cannot_be_compared_are_refused_in_one_line(
    tmp_path: Path, finished: RunConfig, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(finished.output_dir)
    others = Path(shutil.copytree(tiny_model, tmp_path / "others"))
    tokenizer = AutoTokenizer.from_pretrained(others)
    words = json.loads((others / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (others / "tokenizer.json").write_text(json.dumps(words))
    assert AutoTokenizer.from_pretrained(others).get_vocab() != tokenizer.get_vocab()
    for flag, model, told in (
        (
            "--model",
            folder / "reward",
            "--model must be a language model or an adapter of one; got",
        ),
        ("--model", tmp_path / "nowhere", "nowhere"),
        ("--model", others, f"--model '{others}' must have the policy's tokens, which it reads"),
        ("--reward-model", folder / "sft", "must have a scalar head already"),
    ):
        assert main(["eval", str(folder), flag, str(model)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line


def test_bad_rows_are_dropped_where_asked_for(
    tmp_path: Path, finished: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    good = read_jsonl(write_preferences(tmp_path / "good.jsonl", 5, seed=12))
    file = write_jsonl(tmp_path / "holed.jsonl", [*good, 7])
    run = finished.output_dir
    assert main(["eval", run, "--data", file]) == 2
    assert "--on-bad-row drop" in capsys.readouterr().err
    assert main(["eval", run, "--data", file, "--on-bad-row", "drop"]) == 0
    (account,) = record_of(finished, "holed")["data"]
    assert (account["rows"], account["used"], sum(account["dropped"].values())) == (6, 5, 1)
