"""`tandem sample`: answers against Hugging Face's, rows against plain loops, stops, files."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from tandem.cli import main
from tandem.config.dataset import DataConfig
from tandem.config.load import dump_config
from tandem.data.dataset import load_data
from tandem.data.render import Renderer
from tandem.errors import CheckpointError, ConfigError, ModelError, Stopped
from tandem.files import lock
from tandem.models.load import load_tokenizer
from tandem.parallel.world import World
from tandem.training.sample.command import sample
from tandem.training.sample.file import Progress, SampleFile
from tandem.training.sample.flags import parse_sample_flags
from tandem.training.sample.rows import Choice, SampledAnswer, row_of
from tandem.training.sample.summary import _rewards
from tandem.types import Message
from tests.jsonl import read_jsonl, write_jsonl
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training import environments
from tests.training.runs import ran

REWARDS = """
def tenths(prompts, completions, level=None, **columns):
    extra = [0] * len(completions) if level is None else [x or 0 for x in level]
    return [
        None if ord(c[:1] or "a") % 5 == 0 else e + ord(c[:1] or "a") % 7 / 10
        for c, e in zip(completions, extra)
    ]

tenths.in_process = True  # no workers to start
"""
TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi.", "weight": 0},
    {"role": "user", "content": "How are you?\u2028Fine?"},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "Human: and\n\nAssistant:"},
]
ROWS: list[dict[str, Any]] = [
    {"prompt": "What is rain?"},
    {"prompt": "Name a color.", "level": 3},
    {"prompt": TURNS},
    {"prompt": "A pair", "chosen": "yes", "rejected": "no"},
    {"question": "Is it blue?", "answer": "It is.", "system": "Answer."},
    {"prompt": "Labelled", "completion": "bad one", "label": False},
    {"prompt": "Another one?"},
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "prompts.jsonl"
    write_jsonl(path, ROWS)
    return path


Sampled = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sampled(tiny_model: str, prompts: Path, tmp_path: Path) -> Sampled:
    """Runs the command, its first words after the model; returns the rows of its file."""

    def run(name: str, *flags: str, reward: bool = True, world: World | None = None) -> Any:
        output = tmp_path / f"{name}.jsonl"
        own = {"--data": str(prompts), "--output": str(output), "--seed": "7"}
        own |= {"--max-new-tokens": "8", "--samples-per-prompt": "5"}
        pairs = [[flag, value] for flag, value in own.items() if flag not in flags]
        words = [tiny_model, *(word for pair in pairs for word in pair)]
        words += ["--reward-function", f"{prompts.parent}/rewards.py:tenths"] if reward else []
        words += ["--no-self-test", *flags]
        sample(parse_sample_flags(words), world, lines.append)
        return [json.loads(line) for line in output.read_bytes().decode().split("\n")[:-1]]

    lines: list[str] = []
    run.lines = lines  # type: ignore[attr-defined]
    return run


def lines_of(sampled: Sampled) -> list[str]:
    found: list[str] = sampled.lines  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module")
def reward_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = AutoConfig.from_pretrained(tiny_model, num_labels=1)
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    load_tokenizer(tiny_model).save_pretrained(folder)
    return str(folder)


def test_greedy_answers_and_rewards_are_those_of_hugging_face(
    sampled: Sampled, tiny_model: str, reward_model: str
) -> None:
    flags = ("--top-k", "1", "--samples-per-prompt", "1", "--reward-model", reward_model)
    rows = sampled("greedy", *flags, reward=False)
    renderer = Renderer(load_tokenizer(tiny_model))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    scorer = AutoModelForSequenceClassification.from_pretrained(reward_model)
    stops = list(renderer.stop_token_ids)
    for row in rows:
        ids = torch.tensor([renderer.prompt(row["prompt"]).token_ids])
        made = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=stops)
        new = made[0, ids.shape[1] :].tolist()
        (answer,) = row["answers"]
        assert answer["text"] == renderer.decode(new)
        assert (answer["tokens"], answer["finished"]) == (len(new), new[-1] in stops)
        with torch.no_grad():
            score = scorer.score(scorer.model(made).last_hidden_state[:, -1])
        assert answer["reward"] == pytest.approx(float(score), abs=1e-4)
    assert len(rows) == len(ROWS)
    assert len({row["answers"][0]["reward"] for row in rows}) > 3


def plainly_chosen(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """(best answers, pairs) of rows with all answers, by a loop over every answer."""
    best, pairs = [], []
    for row in rows:
        high = low = None
        for answer in row["answers"]:
            if answer["reward"] is None or not answer["text"].strip():
                continue
            if high is None or answer["reward"] > high["reward"]:
                high = answer
            if low is None or answer["reward"] < low["reward"]:
                low = answer
        if high is None or low is None:
            continue
        best.append((row["source"], high["text"], high["reward"]))
        if round(high["reward"] - low["reward"], 6) >= 0.5:
            sides = [(side["text"], side["reward"]) for side in (high, low)]
            pairs.append((row["source"], *sides))
    return best, pairs


def test_best_and_pairs_are_those_of_a_plain_loop(sampled: Sampled, prompts: Path) -> None:
    everything = sampled("all")
    best, pairs = plainly_chosen(everything)
    chosen = sampled("best", "--write", "best", "--keep-cut-off")
    assert [(r["source"], r["completion"][0]["content"], r["reward"]) for r in chosen] == best
    against = sampled("pairs", "--write", "pairs", "--min-margin", "0.5", "--keep-cut-off")
    assert [
        (
            r["source"],
            (r["chosen"][0]["content"], r["chosen_reward"]),
            (r["rejected"][0]["content"], r["rejected_reward"]),
        )
        for r in against
    ] == pairs
    assert 0 < len(pairs) < len(ROWS)  # the margin leaves some out
    assert all(row["n"] == 5 for row in chosen + against)
    assert [row["source"] for row in everything] == [f"{prompts}:{n}" for n in range(1, 8)]
    assert any(a["reward"] is None for row in everything for a in row["answers"])
    assert max(a["reward"] or 0 for a in everything[1]["answers"]) > 3  # the column arrived
    left = [line for line in lines_of(sampled) if line.startswith("left out: ")]
    assert left[-1].startswith(f"left out: {len(ROWS) - len(pairs)} prompt")
    assert "rewards less than 0.5 apart" in left[-1]
    assert lines_of(sampled)[-1].startswith("next: tandem dpo --actor-model ")


def test_the_projects_reader_takes_all_three(sampled: Sampled, tmp_path: Path) -> None:
    for write in ("all", "best", "pairs"):
        sampled(write, "--write", write, *(["--keep-cut-off"] * (write != "all")))
    everything = read_jsonl(tmp_path / "all.jsonl")
    turns = [[(m["role"], m["content"]) for m in row["prompt"]] for row in everything]
    turned = {str(t) for t in turns}
    for write, stage in (("all", "ppo"), ("best", "sft"), ("pairs", "dpo"), ("pairs", "reward")):
        path = tmp_path / f"{write}.jsonl"
        data = load_data(DataConfig(heldout=0.0), [str(path)], seed=1, stages=[stage])
        (account,) = data.ledger.datasets.values()
        written = read_jsonl(path)
        assert list(account.notes) == [
            "turns marked weight 0, train or loss false are shown, not learned"
        ]
        assert account.rows == account.num_used == len(written) > 2
        samples = {"ppo": data.prompts, "sft": data.texts}.get(stage, data.pairs)
        for row, read in zip(written, samples, strict=True):
            assert str([(m.role, m.content) for m in read.prompt]) in turned
            assert [m.learned for m in read.prompt] == [m.get("train", True) for m in row["prompt"]]
            if write == "best":
                assert read.chosen == row["completion"][0]["content"]
            if write == "pairs":
                assert read.chosen == row["chosen"][0]["content"]
                assert read.rejected == row["rejected"][0]["content"]
                assert read.margin == 0
    assert turns[2] == [(t["role"], t["content"]) for t in TURNS]
    assert turns[4] == [("system", "Answer."), ("user", "Is it blue?")]
    assert main(["data", "check", str(tmp_path / "pairs.jsonl"), "--rows", "0"]) == 0


def test_answers_do_not_depend_on_chunks_batches_or_ranks(
    sampled: Sampled, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sampled("whole")
    sampled("parts", "--prompts-per-step", "2", "--generation-batch-size", "3")

    def with_ranks(world: World) -> None:
        sampled("ranks", "--prompts-per-step", "3", world=world)

    on_ranks(2, with_ranks)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert (tmp_path / "parts.jsonl").read_bytes() == whole
    assert (tmp_path / "ranks.jsonl").read_bytes() == whole


def test_every_rank_knows_what_was_written(
    tiny_model: str, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command's exit code is the ranks': a rank that takes the file for empty fails it."""
    output = tmp_path / "ranks.jsonl"
    words = [tiny_model, "--data", str(prompts), "--output", str(output), "--max-new-tokens", "4"]
    words += ["--samples-per-prompt", "2", "--prompts-per-step", "3"]

    def counted(world: World) -> Progress:
        return sample(parse_sample_flags(words), world)

    first, other = on_ranks(2, counted)
    assert first == other
    assert first.rows == len(output.read_bytes().splitlines()) > 0
    assert first.bytes == output.stat().st_size
    assert on_ranks(2, counted) == [first, first], "finished before"


def test_ranks_with_other_flags_write_nothing(
    tiny_model: str, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "mixed.jsonl"
    words = [tiny_model, "--data", str(prompts), "--output", str(output), "--max-new-tokens"]

    def refused(world: World) -> str:
        with pytest.raises(ConfigError) as raised:
            sample(parse_sample_flags([*words, str(4 + world.rank)]), world)
        return str(raised.value)

    first, other = on_ranks(2, refused)
    assert first == other
    assert "got sampling.max_new_tokens 4 on " in first
    assert not output.exists()


class KillError(Exception):
    """Stands for a kill."""


def test_an_interrupted_file_is_continued_to_the_same_bytes(
    sampled: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--prompts-per-step", "2", "--write", "best", "--keep-cut-off")
    sampled("whole", *flags)
    add, draw = SampleFile.add, random.Random(3)
    path = tmp_path / "killed.jsonl"

    def killed(self: SampleFile, rows: Sequence[Mapping[str, Any]]) -> None:
        add(self, rows)
        with path.open("ab") as file:  # a part of the next rows
            file.write(b'{"prompt": [{"role"'[: draw.randrange(1, 20)])
        raise KillError

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(SampleFile, "add", killed)
            with pytest.raises(KillError):
                sampled("killed", *flags)
    sampled("killed", *flags)
    assert "continuing after 4 of 7 prompts" in lines_of(sampled)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    made, other = (
        json.loads((tmp_path / f"{name}.jsonl.made").read_text()) for name in ("killed", "whole")
    )
    for record in (made, other):
        record["progress"].pop("seconds")
    assert made == other
    count = len(lines_of(sampled))
    sampled("killed", *flags)  # loads no model
    told = lines_of(sampled)[count:]
    assert f"{path}: finished before" in told
    assert not any(line.startswith("policy: ") for line in told)


def test_a_signal_stops_after_what_is_being_answered(
    sampled: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = SampleFile.add

    def signalled(self: SampleFile, rows: Sequence[Mapping[str, Any]]) -> None:
        add(self, rows)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SampleFile, "add", signalled)
    with pytest.raises(Stopped, match="after 2 of 7 prompts, which are written"):
        sampled("stopped", "--prompts-per-step", "2")
    assert len((tmp_path / "stopped.jsonl").read_bytes().splitlines()) == 2
    assert any("stops after the prompts that it is answering" in x for x in lines_of(sampled))


def test_a_file_of_something_else_is_refused(
    sampled: Sampled, tmp_path: Path, prompts: Path
) -> None:
    sampled("answers", reward=False)
    path = tmp_path / "answers.jsonl"
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"made with other settings.*sampling.top_p 1.0 -> 0"):
        sampled("answers", "--top-p", "0.5", reward=False)
    with pytest.raises(CheckpointError, match=r"changed: .*the reward function \(rewards.py\)"):
        sampled("answers")
    rows = prompts.read_text()
    try:
        prompts.write_text(rows.replace("rain", "snow"))
        with pytest.raises(CheckpointError, match=r"changed: the rows \(prompts\)\. To make it"):
            sampled("answers", reward=False)
    finally:
        prompts.write_text(rows)
    path.write_bytes(before + b"{}\n")
    with pytest.raises(CheckpointError, match="must be as tandem sample left it"):
        sampled("answers", reward=False)
    assert path.read_bytes() == before + b"{}\n"
    path.write_bytes(before)
    begun = SampleFile(tmp_path / "begun.jsonl", {"seed": 1}, num_prompts=3)
    begun.open()  # killed before anything was answered
    copied = [(file, file.read_bytes()) for file in tmp_path.glob("begun*")]
    begun.close()
    for file, content in copied:
        file.write_bytes(content)
    sampled("begun", reward=False)
    assert (tmp_path / "begun.jsonl").read_bytes() == before
    other = tmp_path / "mine.jsonl"
    other.write_text("{}\n")
    with pytest.raises(CheckpointError, match="must be a new file or one that tandem sample has"):
        sampled("mine", reward=False)
    assert other.read_text() == "{}\n"
    (tmp_path / "answers.jsonl.made").write_text("{")
    with pytest.raises(CheckpointError, match="must be what tandem sample wrote"):
        sampled("answers", reward=False)
    path.unlink()  # made anew
    sampled("answers", reward=False)
    assert path.read_bytes() == before
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(CheckpointError, match="must be a plain file"):
        sampled("pipe", reward=False)
    with pytest.raises(ConfigError, match=r"--output must be outside of .*, whose files are read"):
        sampled("inside", "--data", str(tmp_path), reward=False)
    begun = SampleFile(tmp_path / "failed.jsonl", {"seed": 1}, num_prompts=3)
    begun.open()
    begun.close()
    assert not list(tmp_path.glob("failed*"))


def test_a_template_of_ones_own_frames_the_prompts(
    sampled: Sampled, tiny_model: str, tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
        "{{ eos_token if m['role'] == 'assistant' }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    )
    flags = ("--top-k", "1", "--samples-per-prompt", "1", "--chat-template", str(file))
    rows = sampled("framed", *flags, reward=False)
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = file.read_text()
    renderer = Renderer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for row in rows:
        ids = torch.tensor([renderer.prompt(row["prompt"]).token_ids])
        stops = list(renderer.stop_token_ids)
        made = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=stops)
        (answer,) = row["answers"]
        assert answer["text"] == renderer.decode(made[0, ids.shape[1] :].tolist())
    file.write_text(file.read_text().replace("<", "["))
    with pytest.raises(CheckpointError, match=r"changed: the chat template \(its text\)"):
        sampled("framed", *flags, reward=False)
    sampled("best", *flags, "--write", "best", "--keep-cut-off")
    assert f" --chat-template {file}" in lines_of(sampled)[-1]


def test_a_file_without_rows_says_what_helps_and_is_made_anew(
    tiny_model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "none.jsonl"
    words = ["sample", tiny_model, "--data", str(prompts), "--output", str(output)]
    words += ["--max-new-tokens", "2", "--samples-per-prompt", "2", "--write", "best"]
    words += ["--reward-function", f"{prompts.parent}/rewards.py:tenths", "--min-reward", "99"]
    assert main(words) == 2
    told = capsys.readouterr()
    assert "note: to leave fewer prompts out, " in told.out
    assert "the first step" not in told.out
    assert f"must have at least one row; got none of {len(ROWS)} prompts" in told.err
    assert main([*words[:-2], "--keep-cut-off"]) == 0
    told = capsys.readouterr()
    assert "note: to leave" not in told.out
    assert len(output.read_text().splitlines()) > 3


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({"num_among": 4, "among": 2.0, "num_best": 2, "best": 1.8},
         "reward: mean 0.5, of each prompt's best answer 0.9"),
        ({"num_among": 2, "among": 0.5, "num_best": 2, "best": 0.6}, ("reward: mean 0.5 over all "
         "4 answers with a reward; over the 2 to choose from 0.25, over the best 0.3")),
        ({}, "reward: mean 0.5 over all answers"),
    ],
)  # fmt: skip
def test_mean_rewards_are_told_with_what_they_are_over(counts: dict[str, Any], line: str) -> None:
    assert _rewards(Progress(scored=4, rewards=2.0, **counts)) == line


def test_one_process_writes_a_file(sampled: Sampled, tmp_path: Path) -> None:
    def elsewhere(world: World) -> bool:
        return lock(tmp_path / "held.jsonl") is None

    file = SampleFile(tmp_path / "held.jsonl", {}, num_prompts=3)
    file.open()
    assert on_ranks(1, elsewhere) == [True]
    file.close()
    assert on_ranks(1, elsewhere) == [False]


def answers(*rewards: float | None, **changes: Any) -> list[SampledAnswer]:
    made = {"finished": True, "tokens": 3, **changes}
    return [SampledAnswer(made.get("text", f"a{i}"), r, made["finished"], made["tokens"])
            for i, r in enumerate(rewards)]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "choice", "reason"),
    [
        (answers(None, None), Choice("best"), "no answer with a reward"),
        (answers(None, 1.0), Choice("pairs"), "one answer with a reward alone"),
        (answers(2.0, 1.0, finished=False), Choice("best"), "answers cut off by the length limit"),
        (answers(2.0, 1.0, text=" "), Choice("pairs"), "blank answers"),
        (answers(2.0, 1.0, text="a"), Choice("pairs"), "the same text as best and worst"),
        (answers(1.0, 1.0), Choice("pairs"), "equal rewards"),
        (answers(0.3, 0.2), Choice("pairs", 0.2), "rewards less than 0.2 apart"),
        (answers(0.3, 0.2), Choice("best", 0, 0.5), "best reward below 0.5"),
        (answers(0.3, 0.2), Choice("pairs", 0.1, 0.3), ""),
        (answers(0.3, 0.2, finished=False), Choice("pairs", keep_cut_off=True), ""),
        (answers(None), Choice("all"), ""),
    ],
)
def test_why_a_prompt_has_no_row(given: list[SampledAnswer], choice: Choice, reason: str) -> None:
    row, found = row_of([Message("user", "hi")], "f:1", given, choice)
    assert (row is None, found) == (bool(reason), reason)


def test_a_row_has_its_prompts_tools_and_calls() -> None:
    call = Message("assistant", "", tool_calls='[{"function": {"name": "now"}}]')
    asked = [Message("user", "hi"), call, Message("tool", "12", tool_call_id="1")]
    row, _ = row_of(asked, "f:1", answers(1.0), Choice("best"), '[{"type": "function"}]')
    assert row is not None
    assert row["tools"] == [{"type": "function"}]
    assert row["prompt"][1]["tool_calls"] == [{"function": {"name": "now"}}]
    assert row["prompt"][2] == {"role": "tool", "content": "12", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--write", "best"], "--write best must have a reward to choose by; got none"),
        (["--write", "bets"], "--write must be one of all, best, pairs; got 'bets'"),
        (["--write", "pairs", "--reward-model", "r"], "--samples-per-prompt must be at least 2"),
        (["--min-margin", "1"], "--min-margin must go with --write pairs; got --write all"),
        (["--keep-cut-off"], "--keep-cut-off must go with --write best or pairs"),
        (["--min-reward", "nan"], "--min-reward must be a finite number; got nan"),
        (["--kl-coef", "1"], "--ppo.kl-coef is not read by tandem sample"),
        (["--outptu", "x"], "--outptu is not a flag of tandem sample. Did you mean --output?"),
        (["--temprature", "1"], "Did you mean --temperature?"),
        (["--lr", "1"], "--lr is not a flag of tandem sample. See tandem sample --help"),
        (["--temperature", "0"], "sampling.temperature must be >= 0.0001; got 0"),
        (["--output", "a.csv"], "--output must end in .jsonl; got 'a.csv'"),
        (["--model", "sft"], "--model must go with a run's folder"),
        (["--data"], "--data must have values; got none"),
        (["--data", ""], "data must name at least one data set; got none"),
        (["--scoring.reward-models", "x"], "scoring.reward_models must be empty without"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = (["--data", "p.jsonl"], ["--output", "o.jsonl"])
    words = [word for pair in given if pair[0] != flags[0] for word in pair]
    assert main(["sample", "model", *words, *flags]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_model_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--data", "p.jsonl"]) == 2
    assert "tandem sample: the model must come first; got --data." in capsys.readouterr().err


def test_a_run_gives_its_policy_its_rewards_and_its_knobs(tmp_path: Path) -> None:
    def settings(*flags: str) -> Any:
        words = [str(run), "--data", "p.jsonl", "--output", "o.jsonl", *flags]
        return parse_sample_flags(words).config

    def finish(folder: str) -> None:
        (run / folder).mkdir(parents=True)
        (run / folder / "config.json").touch()

    run = tmp_path / "run"
    config = tiny_config(
        run, "base", "train.jsonl", stages=["sft", "reward", "grpo"], seed=5, dropout=0,
        reward_model="begins/here",
        sampling={"max_new_tokens": 12, "top_p": 0.9, "samples_per_prompt": 4},
        grpo={"reward_function": ["r.py:f"], "reward_function_weight": 2.0, "minibatch_size": 4},
        scoring={"combine": "group", "deadline_seconds": 9},
        dataset={"max_prompt_tokens": 96, "chat_template": "gone.jinja"},
    )  # fmt: skip
    run.mkdir()
    (run / "chat_template.jinja").write_text("the copy")
    (run / "config.yaml").write_text(dump_config(config))
    with pytest.raises(ModelError, match="must have a finished stage with a policy; got none"):
        settings()
    assert settings("--model", "base").actor_model == "base"
    finish("sft")
    found = settings()
    assert found.actor_model == str(run / "sft")
    assert found.reward_model == ""  # not finished; nor what it begins with
    assert found.ppo.reward_function == ("r.py:f",)
    assert found.ppo.reward_function_weight == 2
    assert (found.seed, found.sampling.top_p, found.sampling.samples_per_prompt) == (5, 0.9, 1)
    assert (found.dataset.max_prompt_tokens, found.dataset.heldout) == (96, 0)
    assert (found.scoring.deadline_seconds, found.scoring.combine) == (9, "sum")
    assert found.data == ("p.jsonl",)
    assert found.dataset.chat_template == str(run / "chat_template.jinja")
    finish("reward")
    finish("grpo/actor")
    assert settings().actor_model == str(run / "grpo/actor")
    assert settings().reward_model == str(run / "reward")
    assert settings("--model", "sft").actor_model == str(run / "sft")
    named = settings("--reward-model", "other", "--top-p", "1")
    assert (named.reward_model, named.ppo.reward_function) == ("other", ())
    assert named.sampling.top_p == 1
    with pytest.raises(ModelError, match=r"--model must be one that .* has, grpo, sft or base"):
        settings("--model", "ppo")
    words = ["m", "--output", "o.jsonl", "--config", str(run / "config.yaml")]
    filed = parse_sample_flags(words).config
    assert (filed.actor_model, filed.data) == ("m", ("train.jsonl",))
    with pytest.raises(ConfigError, match="must be at least 2"):
        settings("--write", "pairs")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_frozen_weights_are_sampled_as_the_run_had_them(
    kind: str, tiny_model: str, prompts: Path, preferences: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ran(tiny_config(
        run, tiny_model, preferences, stages=["sft"], lora__rank=2, parallel__frozen_weights=kind,
        sft__lora_learning_rate=0.1, sft__max_steps=12,
    ))  # fmt: skip
    rest = ["--data", str(prompts), "--temperature", "0.001", "--max-new-tokens", "6"]

    def said(model: str, *flags: str) -> list[str]:
        settings = parse_sample_flags([model, *rest, "--output", str(tmp_path / "o.jsonl"), *flags])
        assert settings.config.parallel.frozen_weights in (kind, "")
        sample(settings, print_line=lambda line: None)
        lines = (tmp_path / "o.jsonl").read_text("utf-8").rstrip("\n").split("\n")
        (tmp_path / "o.jsonl").unlink()
        return [json.loads(line)["answers"][0]["text"] for line in lines]

    trained = said(str(run))
    assert trained != said(str(run), "--model", "base")
    assert said(tiny_model, "--parallel.frozen-weights", kind) == said(str(run), "--model", "base")


TALKING = ("--environment", f"{environments.__file__}:thrice", "--logit-bias", "4:5")


def test_conversations_are_rows_of_all_their_turns(sampled: Sampled, tmp_path: Path) -> None:
    every = sampled("every", *TALKING)
    talked = 0
    for row in every:
        for answer in row["answers"]:
            turns = answer.get("turns", [{"role": "assistant", "content": answer["text"]}])
            assert turns[-1] == {"role": "assistant", "content": answer["text"]}
            said, heard = turns[::2], turns[1::2]
            assert [turn["content"] for turn in heard] == [
                f"{len(turn['content'])} letters." for turn in said[:-1]
            ]
            talked += bool(heard)
    assert talked > 5
    best = sampled("best", *TALKING, "--write", "best")
    by_place = {row["source"]: row["answers"] for row in every}
    for row in best:
        answers = by_place[row["source"]]
        assert {json.dumps(row["completion"])} & {
            json.dumps(a.get("turns", [{"role": "assistant", "content": a["text"]}]))
            for a in answers
        }
        assert row["prompt"][-1]["role"] == "user"
    file = tmp_path / "best.jsonl"
    read = load_data(DataConfig(heldout=0.0), (str(file),), (), (), seed=1, stages=("sft",)).texts
    assert len(read) == len(best)
    longest = max(best, key=lambda row: len(row["completion"]))
    assert len(longest["completion"]) > 1
    assert [s.chosen for s in read] == [row["completion"][-1]["content"] for row in best]


def test_conversations_are_no_pairs_and_depend_on_their_environment(
    sampled: Sampled, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="pairs must go with single answers: conversations"):
        sampled("pairs", *TALKING, "--write", "pairs")
    sampled("first", *TALKING)
    with pytest.raises(CheckpointError, match="environment"):
        sampled("first", "--logit-bias", "4:5")


def test_what_a_killed_command_was_writing_is_removed(tmp_path: Path) -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    left, others = (tmp_path / f".{name}.jsonl.made.{process}" for name in ("[a]", "other"))
    for file in (left, others):
        file.touch()
    begun = SampleFile(tmp_path / "[a].jsonl", {}, num_prompts=3)
    begun.open()
    begun.close()
    assert not left.exists()
    assert others.exists()
