"""RL with an environment: what is trained on, what rewards see, and the same run on other ranks and
after stops."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tandem.cli import main
from tandem.config.conversations import answer_tokens, conversation_tokens, sampled_tokens
from tandem.config.load import check_config
from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.engine.forward import response_logprobs
from tandem.errors import ConfigError, DataError
from tandem.generation.conversing import ConversationRow
from tandem.models.load import load_tokenizer
from tandem.parallel.world import World
from tandem.predict.record import EVALUATE
from tandem.rewards.environment import Environment
from tandem.rewards.scoring import RewardFunctions
from tandem.training.checks.conversation_trial import check_environment
from tandem.training.conversations import (
    ConversationSource,
    conversation_metrics,
    conversation_source,
)
from tandem.training.flight_recorder import rows_of
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.training.replay import replay
from tandem.training.reward_function import function_scores
from tandem.types import PromptRow, Rollout, Source
from tests.ranks import on_ranks
from tests.training import environments
from tests.training.runs import (
    assert_equal_runs,
    assert_same_measures,
    ran,
    ran_with_stops,
    ranks_ran,
    records,
)
from tests.training.test_grpo import config_of

FILE = environments.__file__
SAMPLING = {"max_new_tokens": 8, "samples_per_prompt": 3, "logit_bias": ["4:5"]}
"""The bias lets a policy that has learned nothing end its answers."""
WORDS = ("cat", "elephant", "sun", "green")


def talking(folder: Path, model: str, name: str = "thrice", **changes: Any) -> RunConfig:
    grpo = {"environment": f"{FILE}:{name}", "max_turns": 4, "prompts_per_step": 4,
            "minibatch_size": 12, **changes.pop("grpo", {})}  # fmt: skip
    sampling = {**SAMPLING, **changes.pop("sampling", {})}
    dataset = {"max_prompt_tokens": 64, **changes.pop("dataset", {})}
    return config_of(folder, model, grpo=grpo, sampling=sampling, dataset=dataset, **changes)


def own_letters(
    completions: list[str], new_messages: list[list[dict[str, str]]], **columns: object
) -> list[float]:
    """How many letters all answers of a conversation have; the last is the completion."""
    assert [turns[-1]["content"] for turns in new_messages] == completions
    return [
        float(sum(len(turn["content"]) for turn in turns if turn["role"] == "assistant"))
        for turns in new_messages
    ]


@dataclass(frozen=True)
class Rows:
    """What a trial of an environment reads."""

    prompts: list[PromptRow]
    renderer: Renderer
    judges: tuple[Renderer, ...] = ()


def trainer_of(config: RunConfig, **more: Any) -> tuple[PPOTrainer, list[PromptRow]]:
    engine = make_engine(config, config.actor_model)
    conversations = conversation_source(config, engine.renderer, **more)
    assert conversations is not None
    trainer = PPOTrainer(
        engine,
        config,
        num_steps=3,
        reward_function=own_letters,
        source=conversations.with_policy(engine),
    )
    prompts = [engine.renderer.prompt(f"Say {word}.", {"answer": word}) for word in WORDS]
    return trainer, prompts


def test_every_answer_is_trained_on_and_nothing_else(tiny_model: str, tmp_path: Path) -> None:
    trainer, prompts = trainer_of(talking(tmp_path, tiny_model))
    engine = trainer.engine
    made = trainer.generate_experience(prompts, step=1)
    rollout, renderer = made.rollout, engine.renderer
    lengths = []
    for row, spans in enumerate(rows_of(made.batch)):
        prompt = rollout.prompts[row]
        assert isinstance(prompt, ConversationRow)
        turns = [turn.content for turn in prompt.messages[1:]] + [rollout.responses[row]]
        said, heard = turns[::2], turns[1::2]
        assert heard == [f"{len(text)} letters." for text in said[:-1]]
        ids = spans["token_ids"]
        assert [renderer.decode(ids[b:e]) for b, e in spans["responses"]] == said
        between = zip(spans["responses"], spans["responses"][1:], strict=False)
        for n, ((_, end), (begin, _)) in enumerate(between):
            text = engine.tokenizer.decode(ids[end:begin])
            assert text == f"<|user|>{heard[n]}<|end|><|assistant|>"
        lengths.append(float(sum(map(len, said))))
    assert made.scores.tolist() == lengths
    assert made.metrics["conversation_answers"] > 1.5
    with torch.no_grad():
        logprobs, _ = response_logprobs(engine.actor, made.batch)
    torch.testing.assert_close(made.old_logprobs, logprobs, atol=1e-5, rtol=1e-5)
    assert not bool(made.advantages[~made.batch.response_mask].any())
    metrics = trainer.train_rlhf(made, step=1)
    assert metrics["ratio_gap_before_update"] < 1e-5


def test_shares_of_ends_add_up(tiny_model: str, tmp_path: Path) -> None:
    lines: list[str] = []
    for name, end in (("on_and_on", "conversations_cut"), ("breaks", "environment_failed")):
        config = talking(tmp_path, tiny_model, name, grpo={})
        trainer, prompts = trainer_of(config, print_line=lines.append)
        metrics = trainer.generate_experience(prompts, step=1).metrics
        assert metrics[end] > 0.2
        others = {"conversations_over", "conversations_cut", "environment_failed"} - {end}
        assert [metrics[other] for other in others] == [0.0, 0.0]
    (line,) = lines
    assert "breaks failed on " in line
    assert "the first: conversation:1: ValueError: a broken tool" in line


def test_a_conversation_has_no_more_tokens_than_it_may(tiny_model: str, tmp_path: Path) -> None:
    limits = {"grpo": {"max_conversation_tokens": 36}, "dataset": {"max_prompt_tokens": 16}}
    config = talking(tmp_path, tiny_model, "on_and_on", **limits)
    trainer, prompts = trainer_of(config)
    rollout = trainer.generate_experience(prompts, step=1).rollout
    assert int(rollout.batch.lengths().max()) <= 36
    ends = [row.end for row in rollout.prompts if isinstance(row, ConversationRow)]
    assert "tokens" in ends


def test_failures_stop_a_run_that_says_so(tiny_model: str, tmp_path: Path) -> None:
    config = talking(tmp_path, tiny_model, "breaks", scoring={"on_failure": "stop"})
    trainer, prompts = trainer_of(config, print_line=lambda line: None)
    with pytest.raises(DataError, match=r"breaks failed on .* a broken tool. Fix the function"):
        trainer.generate_experience(prompts, step=1)


def test_a_run_stopped_in_the_middle_is_the_same_run_and_replays(
    tiny_model: str, preferences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = talking(tmp_path / "straight", tiny_model, data=[preferences], save_async=False)
    straight = ran(config)
    lines = ran_with_stops(config, tmp_path / "stopped", [("grpo", 2)])
    assert_equal_runs(tmp_path / "stopped", straight)
    assert any("hears as the answer to 4 prompts: goes on with 4" in line for line in lines)
    assert any("conversations of up to 4 answers and 120 tokens with " in line for line in lines)
    told = (straight / "predictions.jsonl").read_text("utf-8").splitlines()
    outcomes = [json.loads(line) for line in told]
    assert outcomes
    assert all(o["predicted_bytes"] for o in outcomes if o["phase"] != EVALUATE)
    # Their length is not known, nor may constants be fitted to the longest.
    assert {outcome["predicted_seconds"] for outcome in outcomes} == {None}
    steps = [record["values"] for record in records(straight) if record["step"] > 0]
    assert all(values["conversation_answers"] > 1 for values in steps)
    assert replay(str(straight), 2) == 0
    assert "grpo step 2, again" in capsys.readouterr().out
    made_from = json.loads((straight / "grpo/MANIFEST.json").read_text("utf-8"))["facts"][
        "made_from"
    ]
    assert list(made_from["the environment"]) == ["environments.py"]
    evaluation = json.loads((straight / "evaluation.json").read_text("utf-8"))
    assert list(evaluation["made_from"]["the environment"]) == ["environments.py"]
    # Their answers on held-out prompts are conversations' as well.
    assert evaluation["models"]["grpo"]["heldout_response_tokens"] > SAMPLING["max_new_tokens"]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_have_the_conversations_of_one(
    tiny_model: str, preferences: str, tmp_path: Path, stage: int
) -> None:
    config = talking(
        tmp_path / "one",
        tiny_model,
        data=[preferences],
        grpo={"steps": 2},
        parallel={"actor_zero_stage": stage},
    )
    alone = ran(config)
    on_ranks(2, ranks_ran, replace(config, output_dir=str(tmp_path / "two")))
    assert_same_measures(tmp_path / "two", alone)


def metrics_of(end: str) -> dict[str, float]:
    rows = tuple(
        ConversationRow((1,), (), {}, Source("a", "a", 1), given=0, end=e)  # type: ignore[arg-type]
        for e in (end, "length", "length", "over")
    )
    rollout = Rollout(*[None] * 5, rows, (), None)  # type: ignore[arg-type]
    return conversation_metrics(rollout)


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ("turns", "conversations_cut"),
        ("tokens", "conversations_cut"),
        ("failed", "environment_failed"),
    ],
)
def test_metrics_count_each_end(end: str, name: str) -> None:
    found = metrics_of(end)
    assert found[name] == 0.25
    assert found["conversations_over"] == 0.25
    assert found["conversation_answers"] == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wants", "its parameter price is none of them"),
        ("of_a_tool", "roles must be system, user or assistant; got tool"),
        ("halved", "environments.py:halved, asked what"),
        ("halved", "shows; got: text must hold no half of a surrogate pair"),
        ("slow", "took more than 0.2 s"),
    ],
)
def test_an_environment_is_tried_before_anything_runs(
    tiny_model: str, tmp_path: Path, name: str, told: str
) -> None:
    config = talking(tmp_path, tiny_model, name, scoring={"deadline_seconds": 0.2})
    engine = make_engine(config, tiny_model)
    prompts = [engine.renderer.prompt("Say cat.")]
    with pytest.raises(ConfigError) as caught:
        check_environment(config, Rows(prompts, engine.renderer), ["answer"], World(), print)
    assert told in str(caught.value)


def test_a_role_that_the_template_leaves_out_is_told(tiny_model: str, tmp_path: Path) -> None:
    config = talking(tmp_path, tiny_model, "of_a_tool")
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    renderer = Renderer(tokenizer)
    prompts = [renderer.prompt("Say cat.")]
    with pytest.raises(ConfigError, match="a turn of role tool, of which it writes nothing"):
        check_environment(config, Rows(prompts, renderer), ["answer"], World(), print)


def failing_on(world: World, config: RunConfig) -> list[str]:
    """What is told of a rollout on whose last prompt the environment fails."""
    engine = make_engine(config, config.actor_model, world=world)
    lines: list[str] = []
    conversations = conversation_source(
        config, engine.renderer, world=world, print_line=lines.append
    )
    assert conversations is not None
    words = ("good", "good", "good", "bad")
    prompts = [engine.renderer.prompt("Say cat.", {"answer": word}) for word in words]
    conversations.with_policy(engine).collect(prompts, step=1)
    conversations.close()
    return lines


def test_what_fails_on_another_rank_is_told(tiny_model: str, tmp_path: Path) -> None:
    config = talking(tmp_path, tiny_model, "halves")
    alone = failing_on(World(), config)
    assert len(alone) == 1
    assert "halves failed on " in alone[0]
    assert on_ranks(2, failing_on, config) == [alone, alone]


def test_ids_of_a_completion_are_the_last_answers(tiny_model: str, tmp_path: Path) -> None:
    trainer, prompts = trainer_of(talking(tmp_path, tiny_model))
    renderer = trainer.engine.renderer
    seen: list[int] = []

    def by_ids(
        completions: list[str], completion_ids: list[list[int]], **columns: object
    ) -> list[float]:
        assert [renderer.decode(ids) for ids in completion_ids] == completions
        seen.extend(map(len, completion_ids))
        return [0.0] * len(completions)

    by_ids.in_process = True  # type: ignore[attr-defined]
    rollout = trainer.answering.source.collect(prompts, step=1)
    function_scores(RewardFunctions([by_ids]), rollout, renderer)
    assert len(seen) == len(rollout)


def test_a_reward_model_must_hold_a_conversation(
    tiny_model: str, preferences: str, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    model.config.max_position_embeddings = 90
    model.save_pretrained(short)
    load_tokenizer(tiny_model).save_pretrained(short)
    config = talking(tmp_path / "run", tiny_model, data=[preferences], reward_model=str(short))
    with pytest.raises(
        ConfigError, match=r"the reward model's 90 positions; got .*_conversation_t"
    ):
        ran(config)
    fits = talking(tmp_path / "run", tiny_model, reward_model=str(short), data=[preferences],
                   grpo={"environment": "", "max_turns": 8, "steps": 1})  # fmt: skip
    ran(fits)


def test_knobs_that_exclude_an_environment(
    tmp_path: Path, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes, told in (
        ({"hybrid_engine": False}, "hybrid_engine must be on with grpo.environment"),
        ({"parallel": {"inference_tp_size": 2}}, "inference_tp_size must be 1 with grpo.env"),
        ({"dataset": {"chat_template": "none"}}, "chat_template must have roles with grpo.env"),
        ({"grpo": {"max_conversation_tokens": 70}}, "at least dataset.max_prompt_tokens + sampl"),
        ({"grpo": {"environment": "", "max_turns": 2}}, "max_turns must go with grpo.environment"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_config(talking(tmp_path, tiny_model, **changes))
        assert told in str(caught.value)
    flags = [
        "--stages",
        "online-dpo",
        "--ppo.environment",
        f"{FILE}:thrice",
        "--ppo.max-turns",
        "2",
    ]
    assert main(["train", "--data", "embedded", *flags, "--output-dir", str(tmp_path / "run")]) == 2
    assert "ppo.environment must keep its default in online-dpo" in capsys.readouterr().err


def test_lengths_follow_from_the_knobs(tmp_path: Path, tiny_model: str) -> None:
    config = talking(tmp_path, tiny_model)
    assert sampled_tokens(config) == 4 * 8
    assert conversation_tokens(config) == 64 + 4 * 8 + 3 * 8
    assert answer_tokens(config, 60) == 60
    assert answer_tokens(config, 60, positions=100) == 40
    assert answer_tokens(config, 60, positions=50) == 8  # which is refused elsewhere
    alone = talking(tmp_path, tiny_model, grpo={"environment": "", "max_turns": 8})
    assert (sampled_tokens(alone), answer_tokens(alone, 60)) == (8, 8)


def test_a_function_in_this_process_and_one_in_its_own_make_the_same(
    tiny_model: str, tmp_path: Path
) -> None:
    config = talking(tmp_path, tiny_model)
    engine = make_engine(config, tiny_model)
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in WORDS]

    def here(messages: Any) -> str | None:
        return environments.thrice(messages)

    here.in_process = True  # type: ignore[attr-defined]
    rollouts = []
    for function in (here, environments.thrice):
        conversations = ConversationSource(
            Environment(function), engine.renderer, max_answers=4, max_tokens=120
        )
        rollouts.append(conversations.with_policy(engine).collect(prompts, step=1))
        conversations.close()
    one, other = rollouts
    assert torch.equal(one.batch.token_ids, other.batch.token_ids)
    assert one.prompts == other.prompts
