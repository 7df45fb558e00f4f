"""RL with tools: what prompts offer, calls within rollouts, what is trained, written and told."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import get_json_schema

from tandem.cli import main
from tandem.config.load import check_config
from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.data.spoken import as_judged
from tandem.engine.forward import response_logprobs
from tandem.errors import CheckpointError, ConfigError, DataError
from tandem.generation.conversing import ConversationRow
from tandem.models.load import load_tokenizer
from tandem.parallel.world import World
from tandem.rewards.scoring import RewardFunctions
from tandem.rewards.tool_schema import offered_tools, tool_names, tool_schema
from tandem.training.checks.conversation_trial import check_environment
from tandem.training.conversations import conversation_source
from tandem.training.flight_recorder import rows_of
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.training.reward_function import function_scores
from tandem.training.stage_data import prepare_rows
from tandem.types import Message, PromptRow, Source
from tests.data.built_tokenizers import CHATML, byte_level
from tests.data.test_tool_rendering import INST, PYTHONIC, TAGGED, TOOLS, built
from tests.jsonl import read_jsonl, write_jsonl
from tests.ranks import on_ranks
from tests.tiny import CALL, WRONG_CALL, save_calling_model
from tests.training import tool_functions
from tests.training.runs import (
    StopError,
    assert_equal_runs,
    assert_same_measures,
    ran,
    ran_with_stops,
    ranks_ran,
    records,
    stop_at,
)
from tests.training.test_grpo import config_of

FILE = tool_functions.__file__
WORDS = ("cat", "elephant", "sun", "green")


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_calling_model(tmp_path_factory.mktemp("calling"))


def talking(folder: Path, model: str, **changes: Any) -> RunConfig:
    tokenizer = load_tokenizer(model)
    grpo = {"tools": [f"{FILE}:add"], "max_turns": 3, "prompts_per_step": 4, "minibatch_size": 12,
            "actor": {"learning_rate": 1e-4, "schedule": "constant", "warmup": 0.0},
            **changes.pop("grpo", {})}  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids([CALL, WRONG_CALL, tokenizer.eos_token])
    biases = [f"{i}:{bias}" for i, bias in zip(ids, (12, 11, 12), strict=True)]
    sampling = {"max_new_tokens": 4, "samples_per_prompt": 3, "logit_bias": biases}
    dataset = {"max_prompt_tokens": 600, **changes.pop("dataset", {})}
    return config_of(folder, model, grpo=grpo, sampling=sampling, dataset=dataset, **changes)


def trainer_of(
    config: RunConfig, reward: Any = tool_functions.num_calls
) -> tuple[PPOTrainer, list[PromptRow]]:
    engine = make_engine(config, config.actor_model)
    conversations = conversation_source(config, engine.renderer)
    assert conversations is not None
    source = conversations.with_policy(engine)
    trainer = PPOTrainer(engine, config, num_steps=3, reward_function=reward, source=source)
    tools = offered_tools(config.grpo.tools, "grpo.tools")
    return trainer, [engine.renderer.prompt(f"Say {word}.", tools=tools) for word in WORDS]


def test_calls_are_made_heard_and_trained_on(calling: str, tmp_path: Path) -> None:
    trainer, prompts = trainer_of(talking(tmp_path, calling))
    engine, renderer = trainer.engine, trainer.engine.renderer
    made = trainer.generate_experience(prompts, step=1)
    calls, failed, rewards = 0, 0, []
    for row, spans in enumerate(rows_of(made.batch)):
        prompt = made.rollout.prompts[row]
        assert isinstance(prompt, ConversationRow)
        turns = prompt.messages[1:]
        answers = [turn for turn in turns if turn.role == "assistant"]
        texts = [renderer.decode(spans["token_ids"][b:e]) for b, e in spans["responses"]]
        said = [renderer.spoken(text, prompt.tools, ()).turn for text in texts]
        assert [turn.tool_calls != "" for turn in said[:-1]] == [True] * len(answers)
        wanted = [json.loads(turn.tool_calls) for turn in answers]
        heard = [turn for turn in turns if turn.role == "tool"]
        assert [turn.tool_call_id for turn in heard] == [c["id"] for each in wanted for c in each]
        for turn, call in zip(heard, (c for each in wanted for c in each), strict=True):
            right = call["function"]["arguments"] == {"a": 2, "b": 3}
            assert turn.content == ("5" if right else "Error: add takes a, b; got c")
            failed += not right
        calls += len(heard)
        last = json.loads(said[-1].tool_calls or "[]")  # that no answer came to
        rewards.append(float(len(heard) + len(last)))
        # What a model would be shown of the same turns.
        shown = renderer.prompt(prompt.messages, tools=prompt.tools).token_ids
        texts = [renderer.continuation(ids) for ids in (prompt.token_ids, shown)]
        assert len({"".join(text.split()) for text in texts}) == 1  # it wrote no space before calls
    assert made.scores.tolist() == [min(reward, 10.0) for reward in rewards]
    assert 0 < failed < calls
    assert made.metrics["tool_calls"] == calls / len(rewards)
    assert made.metrics["tool_calls_failed"] == failed / calls
    with torch.no_grad():
        logprobs, _ = response_logprobs(engine.actor, made.batch)
    torch.testing.assert_close(made.old_logprobs, logprobs, atol=1e-5, rtol=1e-5)
    assert trainer.train_rlhf(made, step=1)["ratio_gap_before_update"] < 1e-5


def test_functions_see_calls_of_single_answers_too(calling: str, tmp_path: Path) -> None:
    """Rows that list tools, in a run that calls none."""
    config = talking(tmp_path, calling, grpo={"tools": [], "max_turns": 8})
    engine = make_engine(config, calling)
    tools = offered_tools([f"{FILE}:add"], "tools")
    prompts = [engine.renderer.prompt(f"Say {word}.", tools=tools) for word in WORDS]
    rollout = engine.rollout(prompts, step=1)
    found = function_scores(
        RewardFunctions([tool_functions.num_calls]), rollout, engine.renderer
    ).functions[0]
    expected = [float(text.count("<tool_call>")) for text in rollout.responses]
    assert found.scores == expected
    assert sum(expected) > 0
    seen: list[Any] = []

    def conversational(completions: Any, **columns: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    conversational.conversational = conversational.in_process = True  # type: ignore[attr-defined]
    function_scores(RewardFunctions([conversational]), rollout, engine.renderer)
    assert [len(turns[-1].get("tool_calls", [])) for turns in seen] == expected


def data_of(folder: Path, *more: dict[str, Any]) -> str:
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in WORDS * 4]
    file = folder / "rows.jsonl"
    return write_jsonl(file, [*rows, *more])


def run_of(folder: Path, model: str, **changes: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    reward = {"reward_function": [f"{FILE}:num_calls"], "eval_prompts": 2}
    grpo = {**reward, **changes.pop("grpo", {})}
    return talking(folder / "run", model, data=[data_of(folder)], grpo=grpo, **changes)


def test_stops_and_ranks_change_nothing(calling: str, tmp_path: Path) -> None:
    lines: list[str] = []
    config = run_of(tmp_path, calling)
    alone = ran(config, lines=lines)
    (tried,) = [line for line in lines if "a call is e.g." in line]
    assert tried.startswith('tool add: a call is e.g. \'<tool_call>{"name": "add"')
    assert any("calls (result " in line and "add takes a, b; got c" in line for line in lines)
    assert all(record["values"]["tool_calls"] > 0 for record in records(alone) if record["step"])
    again = tmp_path / "again"
    ran_with_stops(config, again, [("grpo", 2)])
    assert_equal_runs(again, alone)
    two = replace(config, output_dir=str(tmp_path / "two"))
    on_ranks(2, ranks_ran, two)
    assert_same_measures(tmp_path / "two", alone)


def test_another_tool_is_another_run(calling: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(FILE).read_text())
    config = run_of(tmp_path, calling, grpo={"tools": [f"{file}:add"]})
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "grpo", 2)
        with pytest.raises(StopError):
            ran(config)
    file.write_text(Path(FILE).read_text().replace("return a + b", "return a - b"))
    with pytest.raises(CheckpointError, match=r"changed: the tools \(mine.py\)"):
        ran(config)


@pytest.mark.parametrize("bad", ["drop", "error"])
def test_rows_are_offered_the_runs_tools_or_their_own(
    calling: str, tmp_path: Path, bad: str
) -> None:
    own = tool_schema(tool_functions.add)
    own["function"]["description"] = "In words of its own."
    rows = [{"prompt": "Mine.", "tools": [own]}, {"prompt": "Not.", "tools": TOOLS}]
    file = data_of(tmp_path, *rows)
    config = talking(
        tmp_path / "run", calling, data=[file], dataset={"on_bad_row": bad, "heldout": 0}
    )
    if bad == "error":
        with pytest.raises(DataError, match=r"rows.jsonl:18: tools must be among those .*\(add\)"):
            prepare_rows(config, calling, calling)
        return
    found = prepare_rows(config, calling, calling)
    by_text = {row.messages[0].content: row.tools for row in found.prompts}
    assert by_text["Say cat."] == json.dumps([get_json_schema(tool_functions.add)])
    assert json.loads(by_text["Mine."]) == [own]
    assert "Not." not in by_text
    (account,) = found.ledger.datasets.values()
    assert "lists a tool that is none of the run's" in str(account)


def test_schemas_are_transformers_without_what_the_run_fills() -> None:
    assert tool_schema(tool_functions.add) == get_json_schema(tool_functions.add)
    shown = tool_schema(tool_functions.look_up)["function"]
    assert list(shown["parameters"]["properties"]) == shown["parameters"]["required"] == ["word"]
    assert tool_names(json.dumps(TOOLS)) == ["weather_of", "now"]

    class Adder:
        def __call__(self, a: int) -> int:
            """Adds one.

            Args:
                a: A number.
            """
            return a + 1

    assert tool_schema(Adder())["function"]["name"] == "Adder"
    for function, told in (
        (tool_functions.undescribed, "no docstring"),
        (tool_functions.untyped, "a is missing a type hint"),
        (max, "its signature is not known"),
        (Adder, "got: a class"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            tool_schema(function, "grpo.tools x")
        assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Rows:
    """What a trial of tools reads."""

    prompts: list[PromptRow]
    renderer: Renderer
    judges: tuple[Renderer, ...] = ()


def tried(config: RunConfig, template: str | None, judge: str | None = None) -> list[str]:
    tokenizer = built(CHATML)
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer)
    prompts = [renderer.prompt("Say cat.", tools=offered_tools(config.grpo.tools, "grpo.tools"))]
    judges = (Renderer(built(judge)),) if judge else ()
    lines: list[str] = []
    check_environment(config, Rows(prompts, renderer, judges), [], World(), lines.append)
    return lines


def test_templates_are_tried_before_anything_runs(calling: str, tmp_path: Path) -> None:
    config = talking(tmp_path, calling)
    for template in (TAGGED, PYTHONIC, INST, None):
        (line,) = tried(config, template)
        assert "add" in line
    with pytest.raises(ConfigError, match=r"grpo\.tools must have a chat template that writes ca"):
        tried(config, CHATML)
    silent = TAGGED.replace("{% if tools %}", "{% if false %}")
    with pytest.raises(ConfigError, match=r"grpo\.tools must have a chat template that shows to"):
        tried(config, silent)
    deaf = TAGGED.replace("<tool_response>\n{{ m.content }}", "<tool_response>")
    with pytest.raises(ConfigError, match="a turn of role tool, of which it writes nothing"):
        tried(config, deaf)
    tried(config, TAGGED, CHATML)  # it is shown calls as JSON
    strict = CHATML.replace(
        "{{ m.content }}", "{{ {'user': m.content, 'assistant': m.content}[m.role] + '' }}"
    )
    with pytest.raises(ConfigError, match="that the reward model's chat template takes; got"):
        tried(config, TAGGED, strict)


def test_a_reward_model_reads_calls_in_its_own_form_or_as_json() -> None:
    tools = json.dumps(TOOLS)
    source = Source("", "conversation", 1)
    said = Renderer(built(TAGGED)).spoken('<tool_call>{"name": "now"}</tool_call>', tools, ()).turn
    turns = [Message("user", "When?"), said, Message("tool", "9", name="now")]
    for template, written in (
        (PYTHONIC, '<|python_tag|>{"name": "now", "parameters": {}}'),
        (CHATML, '[{"id": "call00000", "type": "function", "function": {"name": "now", "arg'),
    ):
        tokenizer = built(template)
        row = as_judged(Renderer(tokenizer), turns, "Nine.", source, tools)
        assert written in tokenizer.decode(row.token_ids)
        answer = [i for i, m in zip(row.token_ids, row.response_mask, strict=True) if m]
        assert tokenizer.decode(answer).startswith("Nine.")
    with pytest.raises(DataError):
        as_judged(Renderer(byte_level(CHATML)), [Message("user", "\ud800")], "yes", source, "")


def test_best_answers_are_rows_that_sft_renders_as_they_were(calling: str, tmp_path: Path) -> None:
    config = run_of(tmp_path, calling)
    biases = ["--logit-bias", *config.sampling.logit_bias]
    out = tmp_path / "best.jsonl"
    words = ["sample", calling, "--data", config.data[0], "--output", str(out), "--write", "best"]
    words += ["--tools", f"{FILE}:add", "--max-turns", "3", "--samples-per-prompt", "3"]
    words += ["--max-new-tokens", "4", "--max-prompt-tokens", "600", *biases]
    words += ["--reward-function", f"{FILE}:num_calls", "--device", "cpu"]
    assert main(words) == 0
    rows = read_jsonl(out)
    assert all(row["tools"] == [get_json_schema(tool_functions.add)] for row in rows)
    renderer = Renderer(load_tokenizer(calling))
    called = 0
    for row in rows:
        for turn in row["completion"]:
            called += len(turn.get("tool_calls", ()))
            assert "<tool_call>" not in turn["content"]
    assert called >= sum(row["reward"] for row in rows) > 0
    sft = ["sft", "--actor-model", calling, "--data", str(out), "--output-dir", str(tmp_path / "s")]
    assert main([*sft, "--sft.max-steps", "1", "--device", "cpu", "--max-tokens", "900"]) == 0
    assert renderer.call_reader is not None


def test_knobs_that_exclude_tools(tmp_path: Path, calling: str) -> None:
    for changes, told in (
        ({"hybrid_engine": False}, "hybrid_engine must be on with grpo.tools"),
        ({"dataset": {"chat_template": "none"}}, "chat_template must have roles with grpo.tools"),
        ({"grpo": {"tools": [], "max_turns": 2}}, "must go with grpo.environment or grpo.tools"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_config(talking(tmp_path, calling, **changes))
        assert told in str(caught.value)
