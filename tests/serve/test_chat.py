"""Chat: streaming, commands, hostile text, and which model a path means."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoint.folder import write_folder
from tandem.cli import main
from tandem.config.load import build_config, dump_config
from tandem.config.schema import SamplingConfig
from tandem.errors import CheckpointError, ConfigError, ModelError
from tandem.models.load import load_tokenizer
from tandem.rewards.environment import Environment
from tandem.serve import named_model
from tandem.serve.chat import Conversation, chat
from tandem.serve.named_model import find_model, notes_on_flags
from tests.tiny import CALL, save_calling_model, save_padded_model, save_tiny_model
from tests.training import tool_functions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def talk(model: str, *lines: str, max_new_tokens: int = 8) -> str:
    said: list[str] = []
    queue: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(queue)
        except StopIteration:
            raise EOFError from None

    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    assert chat(model, sampling, read=read, write=said.append) == 0
    return "".join(said)


def test_an_answer_is_streamed_and_the_same_seed_says_the_same(model: str) -> None:
    first = talk(model, "hello", "again")
    assert first.count("assistant> ") == 2
    assert talk(model, "hello", "again") == first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_says_what_its_tokenizer_has_alone(tmp_path: Path, temperature: float) -> None:
    """The model has more outputs, and likes them best: they are no text."""
    from tandem.data.render import Renderer
    from tandem.models.load import load_causal_lm, load_tokenizer
    from tandem.types import Message

    folder = save_padded_model(tmp_path / "padded")
    renderer = Renderer(load_tokenizer(folder))
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=16)
    conversation = Conversation(load_causal_lm(folder), renderer, sampling)
    stream, drawn = conversation._memory.stream, list[int]()

    def watched(*given: Any, **how: Any) -> Iterator[int]:
        for token in stream(*given, **how):
            drawn.append(token)
            yield token

    conversation._memory.stream = watched  # type: ignore[method-assign]
    conversation.turns.append(Message("user", "hi"))
    assert "".join(conversation.answer())
    assert drawn
    assert max(drawn) <= max(renderer.vocabulary.values())
    assert talk(folder, "hello").split("assistant> ")[1].strip()


def test_at_temperature_0_it_is_the_likeliest_token_whatever_the_seed(model: str) -> None:
    from tandem.data.render import Renderer
    from tandem.models.load import load_causal_lm, load_tokenizer
    from tandem.types import Message

    loaded, tokenizer = load_causal_lm(model), load_tokenizer(model)
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt([Message("user", "hi")]).token_ids
    ids = torch.tensor([prompt])
    likeliest = loaded.generate(ids, do_sample=False, max_new_tokens=8, use_cache=False)
    expected = renderer.decode(likeliest[0, len(prompt) :].tolist())
    for seed in (0, 7):
        sampling = SamplingConfig(temperature=0.0, top_p=0.9, max_new_tokens=8)
        conversation = Conversation(loaded, renderer, sampling, seed=seed)
        conversation.turns.append(Message("user", "hi"))
        assert "".join(conversation.answer()) == expected
    said = talk(model, "/set temperature 0", "/set seed 1", "hi", "/clear", "/set seed 2", "hi")
    assert "temperature = 0" in said
    answers = [part.split("\n")[0] for part in said.split("assistant> ")[1:]]
    assert len(answers) == 2
    assert answers[0] == answers[1]


def test_streamed_text_is_the_turn_that_is_kept(model: str) -> None:
    from tandem.data.render import Renderer
    from tandem.models.load import load_causal_lm, load_tokenizer
    from tandem.types import Message

    conversation = Conversation(
        load_causal_lm(model), Renderer(load_tokenizer(model)), SamplingConfig(max_new_tokens=20)
    )
    conversation.turns.append(Message("user", "hi"))
    streamed = "".join(conversation.answer())
    assert conversation.turns[-1] == Message("assistant", streamed)


def test_every_command_of_the_chat_answers(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    out = talk(
        model, "/help", "/system be brief", "hello", f"/save {file}", "/undo", "/retry",
        "/set temperature 0.1", "/set top_p 3", "/set seed 4", "/wat", "/save", "/clear", "/quit",
    )  # fmt: skip
    for part in ("/retry", "saved 2 turns", "temperature = 0.1", "write e.g. /set temperature",
                 "seed = 4", "/wat is not a command", "write e.g. /save", "system prompt: be brief",
                 "removed: hello", "there is no message to answer",
                 "new conversation"):  # fmt: skip
        assert part in out
    row = json.loads(file.read_text())
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]


def test_a_conversation_is_saved_under_endings_that_training_reads_as_rows(
    model: str, tmp_path: Path
) -> None:
    for name in ("chat.txt", "chat", "chat.csv"):
        out = talk(model, "hello", f"/save {tmp_path / name}")
        assert "write e.g. /save good_chats.jsonl" in out
        assert not (tmp_path / name).exists()
    assert "saved 2 turns" in talk(model, "hello", f"/save {tmp_path / 'chat.ndjson'}")


def test_a_conversation_without_turns_is_not_saved(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert "there is nothing to save." in talk(model, "/system be brief", f"/save {file}")
    assert not file.exists()


def test_words_behind_quit_do_not_keep_the_talk_going(model: str) -> None:
    assert "assistant> " not in talk(model, "/quit now", "hello")


def test_a_template_of_one_prompt_begins_every_message_anew(model: str, tmp_path: Path) -> None:
    from tandem.data.chat.own_template import put_template, read_template
    from tandem.models.load import load_tokenizer

    folder = tmp_path / "plain"
    shutil.copytree(model, folder)
    tokenizer = load_tokenizer(model)
    put_template(tokenizer, read_template("none"))
    tokenizer.save_pretrained(folder)
    file = tmp_path / "rows.jsonl"
    out = talk(str(folder), "hello", "again", f"/save {file}")
    assert "takes one prompt: every message begins anew." in out
    assert out.count("assistant> ") == 2
    assert [m["content"] for m in json.loads(file.read_text())["messages"]][:1] == ["again"]
    assert "begins anew" not in talk(model)


def test_text_cannot_act_on_the_terminal(model: str) -> None:
    out = talk(model, "/\x1b[2J", "\x1b]0;title\x07 hello")
    assert "\x1b" not in out


def test_a_conversation_that_outgrows_the_model_says_so_and_goes_on(model: str) -> None:
    out = talk(model, "word " * 400, "hello")
    assert "\nnot answered: the conversation must leave room for an answer" in out
    assert out.count("assistant> ") == 1  # what is no answer does not look like one
    assert "Shorten it, or start a new one.\n" in out, "there is nothing to undo"
    out = talk(model, "hello", "word " * 400, "/clear", "/system be " + "good " * 400, "hello")
    undo = "/undo removes the last message and its answer, /clear all of them"
    told = [line for line in out.splitlines() if line.startswith("not answered")]
    assert told[0].endswith(f"Shorten it, or start a new one: {undo}.")
    assert told[1].endswith("or start a new one: /system shortens the system prompt.")


def test_a_line_that_cannot_be_answered_does_not_end_the_talk(model: str) -> None:
    out = talk(model, "hello", "too long " * 500, "hello again")
    assert out.count("assistant> ") == 2
    assert out.count(" must ") == 1


def test_answers_longer_than_the_model_are_told_at_the_start(model: str) -> None:
    note = (
        "note: the model has 256 positions for the conversation and its answer, so answers are cut"
    )
    assert note not in talk(model, "/quit")
    assert note in talk(model, "/quit", max_new_tokens=256)
    assert note in talk(model, "/set max_new_tokens 1000")


def test_which_model_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "sft").mkdir(parents=True)
    (run / "config.yaml").write_text("actor_model: some/base\n")
    with pytest.raises(ModelError, match="must have a finished sft or ppo stage; got none"):
        find_model(str(run), "")
    (run / "sft" / "config.json").write_text("{}")
    assert find_model(str(run), "") == str(run / "sft")
    (run / "ppo" / "actor").mkdir(parents=True)
    (run / "ppo" / "actor" / "config.json").write_text("{}")
    assert find_model(str(run), "") == str(run / "ppo" / "actor")
    (run / "ppo" / "ema").mkdir()
    (run / "ppo" / "ema" / "config.json").write_text("{}")
    assert find_model(str(run), "") == str(run / "ppo" / "actor")
    assert find_model(str(run), "ema") == str(run / "ppo" / "ema")
    assert find_model(str(run), "base") == "some/base"
    for name in ("pppo", "dpo", "reward"):
        with pytest.raises(
            ModelError, match=f"that .*/run has, ppo, sft, ema or base; got '{name}'"
        ):
            find_model(str(run), name)
    with pytest.raises(ModelError, match="--model must go with a run's folder"):
        find_model(str(tmp_path), "sft")
    assert find_model("gpt2", "") == "gpt2"


def test_an_unfinished_stage_is_told_with_its_step(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "sft")
    (tmp_path / "config.yaml").write_text("actor_model: some/base\nppo:\n  steps: 200\n")
    assert "note: ppo is not finished; the same tandem train command" in talk(
        str(tmp_path), "/quit"
    )
    for step in (150, 173):
        (tmp_path / "checkpoints" / "ppo" / f"step-{step:06d}").mkdir(parents=True)
    out = talk(str(tmp_path), "/quit")
    assert f"tandem serve {tmp_path} answers with its newest checkpoint, step 173 of 200, " in out
    assert f"tandem export {tmp_path} writes its models; the same tandem train command" in out
    with pytest.raises(ModelError, match="must have a finished ppo stage; got step 173 of 200"):
        find_model(str(tmp_path), "ppo")
    (tmp_path / "config.yaml").write_text("actor_model: some/base\nstages: [reward]\n")
    shutil.rmtree(tmp_path / "sft")
    with pytest.raises(ModelError, match="must have a stage with a policy; got reward"):
        find_model(str(tmp_path), "")


def test_a_chat_says_which_model_it_took_and_which_others_there_are(
    model: str, tmp_path: Path
) -> None:
    for name in ("sft", "ppo/actor", "ppo/ema"):
        shutil.copytree(model, tmp_path / name)
    assert talk(model, "/quit").startswith(f"talking to {model}. /help")
    (tmp_path / "config.yaml").write_text("actor_model: some/base\n")
    out = talk(str(tmp_path), "/quit")
    assert out.startswith(
        f"talking to {tmp_path}/ppo/actor (other models: --model sft, ema or base)."
    )


def test_a_model_that_changed_since_it_was_saved_is_refused(model: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "ppo", lambda aside: shutil.copytree(model, aside / "actor"))
    assert "talking to" in talk(str(tmp_path / "ppo" / "actor"), "/quit")
    weights = tmp_path / "ppo" / "actor" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"must have the SHA-256 in its MANIFEST.json; got"):
        talk(str(tmp_path / "ppo" / "actor"), "/quit")


@pytest.mark.parametrize("line", ["bad \udcff byte", "/system \udcff", "/save a\0b", "a\0b"])
def test_a_line_that_cannot_be_written_down_is_refused(model: str, line: str) -> None:
    out = talk(model, line, "hello")
    assert "must be UTF-8 text without NUL; got" in out
    assert out.count("assistant> ") == 1
    out.encode()


def test_typed_bytes_that_are_no_utf_8_do_not_end_the_talk(model: str) -> None:
    lines: Iterator[str | Exception] = iter(
        [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "/quit"]
    )

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, Exception):
            raise line
        return line

    said: list[str] = []
    assert chat(model, SamplingConfig(), read=read, write=said.append) == 0
    assert "not UTF-8" in "".join(said)


@pytest.mark.parametrize(
    "what", ["temperature inf", "temperature nan", "seed -1", "seed 1e9", "top_k -1"]
)
def test_numbers_out_of_range_change_nothing(model: str, what: str) -> None:
    assert "write e.g. /set temperature 0.7" in talk(model, f"/set {what}")


def test_tools_are_called_and_heard(tmp_path: Path) -> None:
    """By a model that always calls, until it is stopped."""
    model = save_calling_model(tmp_path / "model")
    (token,) = load_tokenizer(model).convert_tokens_to_ids([CALL])
    saved = tmp_path / "chats.jsonl"
    lines = ["What is 2 + 3?", f"/save {saved}", "/undo", "/undo"]
    written: list[str] = []

    def read(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    sampling = SamplingConfig(
        max_new_tokens=3, logit_bias=(f"{token}:100",), stop_strings=("</tool_call>",)
    )
    tools = [f"{tool_functions.__file__}:add"]
    assert chat(model, sampling, tools=tools, read=read, write=written.append) == 0
    text = "".join(written)
    begun = CALL.removesuffix("</tool_call>")
    assert text.count(f"assistant> {begun}\n") == text.count("\nadd> 5\n") == 8
    assert "[stopped after 8 answers]" in text
    assert text.count("removed: What is 2 + 3?") == 1
    assert "there is nothing to undo" in text
    row = json.loads(saved.read_text())
    assert [turn["role"] for turn in row["messages"]] == ["user", *["assistant", "tool"] * 8]
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}
    assert row["messages"][2] == {
        "role": "tool", "content": "5", "tool_call_id": "call00000", "name": "add"
    }  # fmt: skip
    assert [tool["function"]["name"] for tool in row["tools"]] == ["add"]


def test_a_call_that_is_stopped_or_cut_off_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_calling_model(tmp_path / "model")
    tokenizer = load_tokenizer(model)
    (call,) = tokenizer.convert_tokens_to_ids([CALL])
    tools = [f"{tool_functions.__file__}:add"]

    def said(**how: Any) -> str:
        lines = iter(["What is 2 + 3?", "/undo"])
        written: list[str] = []

        def read(prompt: str) -> str:
            if (line := next(lines, None)) is None:
                raise EOFError
            return line

        sampling = SamplingConfig(max_new_tokens=2, logit_bias=(f"{call}:100",), **how)
        assert chat(model, sampling, tools=tools, read=read, write=written.append) == 0
        return "".join(written)

    cut = said()  # it would go on
    assert "add>" not in cut
    assert "removed: What is 2 + 3?" in cut

    def stopped(self: Environment, said: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Environment, "heard", stopped)
    text = said(stop_strings=("</tool_call>",))
    assert "[stopped; the message is taken back]" in text
    assert "there is nothing to undo" in text


def test_tools_that_a_model_cannot_call_are_refused(model: str) -> None:
    with pytest.raises(ModelError, match="--tools must go with a model whose chat template shows"):
        chat(model, SamplingConfig(), tools=[f"{tool_functions.__file__}:add"])
    with pytest.raises(ConfigError, match="tool look_up must take messages and the data's columns"):
        chat(model, SamplingConfig(), tools=[f"{tool_functions.__file__}:look_up"])


def test_a_run_whose_policy_calls_tools_names_them(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        dump_config(build_config({"stages": ["grpo"], "grpo": {"tools": ["calc.py:add"]}}))
    )
    assert notes_on_flags(str(tmp_path), [], SamplingConfig()) == [
        "note: its policy may call tools; to make its calls: --tools calc.py:add\n"
    ]
    assert notes_on_flags(str(tmp_path), ["calc.py:add"], SamplingConfig()) == []
    assert notes_on_flags(str(tmp_path / "no run"), [], SamplingConfig()) == []


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"regex": "(yes|no), .*"}, "--regex '(yes|no), .*'"),
        ({"json_schema": "person.json"}, "--json-schema person.json"),
        ({"regex": "a" * 300}, "--regex PATTERN, as in {run}/config.yaml"),
        ({}, ""),
    ],
)
def test_a_run_whose_answers_had_a_form_names_it(
    tmp_path: Path, sampling: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = {"stages": ["grpo"], "sampling": sampling}
    (tmp_path / "config.yaml").write_text(dump_config(build_config(knobs)))
    start = "note: its answers had a form in training; to ask for it: "
    expected = [f"{start}{said.format(run=tmp_path)}\n"] if said else []
    read = []
    real = named_model.load_config
    monkeypatch.setattr(named_model, "load_config", lambda file: read.append(file) or real(file))
    assert notes_on_flags(str(tmp_path), [], SamplingConfig()) == expected
    assert len(read) == 1
    assert notes_on_flags(str(tmp_path), [], SamplingConfig(regex="b")) == []


def test_answers_have_the_form_that_is_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert main(["chat", model, "--regex", "(ab|cd){2}", "--device", "cpu"]) == 0
    answers = re.findall("assistant> (.*)", capsys.readouterr().out)
    assert len(answers) == 2
    assert all(re.fullmatch("(ab|cd){2}", answer) for answer in answers)
    for flags, part in (
        (["--regex", "("], "--regex must be a regular expression that can be followed; got"),
        (["--json-schema", "nowhere.json"], "--json-schema must be a JSON Schema, or a file of"),
        (["--json-schema", "{}", "--regex", "a"], "--regex must go without --json-schema; got 'a'"),
    ):
        assert main(["chat", model, *flags, "--device", "cpu"]) != 0
        said = capsys.readouterr().err
        assert part in said
        assert said.count("\n") == 1


def test_piped_lines_are_shown_before_their_answers(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/set top_k 0\nHi\x1b[2J there\n"))
    assert chat(model, SamplingConfig(max_new_tokens=4)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "you> /set top_k 0" in lines
    said = lines.index("you> Hi\\x1b[2J there")
    assert lines[said + 1].startswith("assistant> ")
