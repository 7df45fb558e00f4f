"""On-policy distillation: a policy learns a teacher's distributions on its own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tandem import make_engine
from tandem.config.critic_free_rules import EXACT_KL
from tandem.config.load import check_config
from tandem.config.schema import GRPOConfig, RunConfig, rl_section
from tandem.data.render import Renderer
from tandem.engine import divergence
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.update import training_mode
from tandem.errors import ConfigError
from tandem.metrics.folder import read_folder
from tandem.models.packed import predictor_states
from tandem.objectives.divergence import EXACT, Divergence
from tandem.parallel.world import World
from tandem.serve.run_files import RunFiles
from tandem.serve.run_views import prompts
from tandem.training.algorithm import actor_loss
from tandem.training.evaluate import policy_metrics
from tandem.training.mixture import mixture_term
from tandem.training.ppo_trainer import PPOTrainer
from tandem.training.replay import replay
from tandem.types import Experience, Source, TokenBatch
from tests.jsonl import read_jsonl
from tests.ranks import on_ranks
from tests.tiny import save_tiny_model, tiny_config, tiny_llama, tiny_tokenizer
from tests.training import environments, letter_rewards
from tests.training.runs import (
    assert_equal_runs,
    assert_same_measures,
    ran,
    ran_with_stops,
    ranks_ran,
    records,
    weights_of,
)

REWARD = f"{letter_rewards.__file__}:starts_early"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7)


def distilling(folder: Path, model: str, data: str, teacher: str, **more: Any) -> RunConfig:
    changes = {"stages": ["distill"], "reference_model": teacher, "grpo__steps": 3, **more}
    changes = {"grpo__prompts_per_step": 8, "grpo__minibatch_size": 8, **changes}
    return tiny_config(folder, model, data, **changes)


def made_by(config: RunConfig, model: str) -> tuple[RLHFEngine, PPOTrainer, Experience]:
    engine = make_engine(config, model)
    rewards = rl_section(config).reward_function or None
    trainer = PPOTrainer(engine, config, num_steps=3, reward_function=rewards)
    rendered = Renderer(tiny_tokenizer())
    asked = ["what is red", "say it again please", "one"]
    rows = [rendered.prompt(text) for text in asked]
    return engine, trainer, trainer.generate_experience(rows, step=1)


def plain_kl(
    student: Any, teacher: Any, batch: TokenBatch, placement: str, temperature: float
) -> Tensor:
    """(B, T) by Hugging Face's forwards of padded rows, the sum over the vocabulary written out."""
    ids, mask = batch.token_ids, batch.attention_mask
    ours = student(ids, attention_mask=mask.long()).logits[:, :-1]
    with torch.no_grad():
        theirs = teacher(ids, attention_mask=mask.long()).logits[:, :-1]
    both = min(ours.shape[-1], theirs.shape[-1])
    p, q = ((z[..., :both] / temperature).log_softmax(-1) for z in (ours, theirs))
    m = (0.3 * q.exp() + 0.7 * p.exp()).log()
    pairs = {
        "exact-in-loss": [(1, p, q)],
        "forward-exact-in-loss": [(1, q, p)],
        "jsd-in-loss": [(0.3, q, m), (0.7, p, m)],
    }[placement]
    kl = sum(share * (one.exp() * (one - two)).sum(-1) for share, one, two in pairs)
    return torch.nn.functional.pad(kl, (1, 0)) * batch.response_mask


@pytest.mark.parametrize("placement", EXACT)
@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_its_gradient_is_that_of_plain_hugging_face(
    placement: str, normalization: str, tmp_path: Path, tiny_model: str, teacher: str,
    preferences: str,
) -> None:  # fmt: skip
    config = distilling(
        tmp_path, tiny_model, preferences, teacher, sampling__temperature=0.7,
        grpo__kl=placement, grpo__normalization=normalization,
        **({"grpo__jsd_beta": 0.3} if placement == "jsd-in-loss" else {}),
    )  # fmt: skip
    engine, trainer, made = made_by(config, tiny_model)
    with training_mode(engine.actor):
        found = actor_loss(engine, trainer.algorithm, made, kl_coef=1.0)
        found.loss.backward()
    student = AutoModelForCausalLM.from_pretrained(tiny_model)
    other = AutoModelForCausalLM.from_pretrained(teacher)
    kl = plain_kl(student, other, made.batch, placement, 0.7)
    weights = 1.0 if normalization == "token" else 1 / made.batch.response_mask.sum(1, keepdim=True)
    loss = (kl * weights).sum()
    loss.backward()
    torch.testing.assert_close(found.loss, loss, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.sums["kl_loss"], kl.sum().detach(), atol=1e-4, rtol=1e-4)
    theirs = dict(student.named_parameters())
    for name, parameter in engine.actor.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("placement", EXACT)
def test_given_answers_teach_the_teacher_s_distributions(
    placement: str, tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    """Texts mixed into an update, against plain Hugging Face."""
    config = distilling(
        tmp_path, tiny_model, preferences, teacher, sampling__temperature=0.7, grpo__kl=placement,
        grpo__ptx_data=[preferences], grpo__ptx_target="reference",
        **({"grpo__jsd_beta": 0.3} if placement == "jsd-in-loss" else {}),
    )  # fmt: skip
    engine = make_engine(config, tiny_model)
    source = Source("texts", "texts.jsonl", 1)
    texts = [engine.renderer.document(text, source) for text in ("red and blue", "one two three")]
    trainer = PPOTrainer(engine, config, ptx_rows=texts)
    batch = TokenBatch.from_rows(texts, engine.renderer.pad_token_id)
    term = mixture_term(engine, batch, 0.5, trainer.algorithm.ptx_divergence)
    with training_mode(engine.actor):
        found = term.loss([0, 1]).loss
        found.backward()
    student = AutoModelForCausalLM.from_pretrained(tiny_model)
    loss = plain_kl(
        student, AutoModelForCausalLM.from_pretrained(teacher), batch, placement, 0.7
    ).sum()
    loss.backward()
    assert loss > 0.01
    torch.testing.assert_close(found, loss, atol=1e-4, rtol=1e-4)
    theirs = dict(student.named_parameters())
    for name, parameter in engine.actor.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-4, rtol=2e-3)
    made = trainer.generate_experience([engine.renderer.prompt("say red")], step=1)
    metrics = trainer.train_rlhf(made, step=1)
    assert metrics["ptx_loss"] * batch.num_response_tokens > 0.01


def test_beside_a_reward_it_adds_to_the_policy_s_loss(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    """In GRPO, where the reference is the policy without its adapters or another model."""
    common: dict[str, Any] = {
        "stages": ["grpo"], "grpo__reward_function": REWARD, "grpo__kl": "exact-in-loss",
        "grpo__kl_coef": 0.3, "grpo__prompts_per_step": 8, "grpo__minibatch_size": 8,
        "lora__rank": 2,
    }  # fmt: skip
    gradients: list[dict[str, Tensor]] = []
    # The adapters' reference is the base, which another model's folder names as well.
    for reference in ("", tiny_model, teacher):
        config = tiny_config(tmp_path, tiny_model, preferences, reference_model=reference, **common)
        engine, trainer, made = made_by(config, tiny_model)
        torch.manual_seed(0)
        adapters = {n: p for n, p in engine.actor.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for parameter in adapters.values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        with training_mode(engine.actor):
            found = actor_loss(engine, trainer.algorithm, made, kl_coef=0.3)
            found.loss.backward()
        assert found.sums["kl_loss"] > 0.01
        assert found.sums["policy_loss"] != 0
        loss = found.sums["policy_loss"] + 0.3 * found.sums["kl_loss"]
        torch.testing.assert_close(found.loss.detach(), loss.detach(), atol=1e-5, rtol=1e-5)
        gradients.append({n: p.grad.clone() for n, p in adapters.items() if p.grad is not None})
    assert gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(gradients[0][name], gradients[2][name]) for name in gradients[0])


def test_padding_of_either_vocabulary_is_left_out(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    tokenizer = tiny_tokenizer()
    torch.manual_seed(3)
    wide = tiny_llama(len(tokenizer) + 8)
    wide.config.eos_token_id = wide.generation_config.eos_token_id = tokenizer.eos_token_id
    wide.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    for student, teacher in (
        (tiny_model, str(tmp_path / "wide")),
        (str(tmp_path / "wide"), tiny_model),
    ):
        config = distilling(tmp_path / "run", student, preferences, teacher)
        engine, trainer, made = made_by(config, student)
        found = actor_loss(engine, trainer.algorithm, made, kl_coef=1.0)
        models = (AutoModelForCausalLM.from_pretrained(model) for model in (student, teacher))
        kl = plain_kl(*models, made.batch, "exact-in-loss", 1.0)
        torch.testing.assert_close(found.loss, kl.sum(), atol=1e-4, rtol=1e-4)


def test_a_run_learns_and_speaks_of_no_reward(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = distilling(
        tmp_path / "run", tiny_model, preferences, teacher, grpo__steps=12, grpo__ema=True,
        grpo__actor={"learning_rate": 1e-2}, grpo__eval_every=4, grpo__keep_best=True,
        log__print_samples_every=4,
    )  # fmt: skip
    lines: list[str] = []
    run = ran(config, lines=lines)
    assert any("learns" in line and teacher in line for line in lines)
    folder = read_folder(run)
    heldout = dict(folder.series("distill", "heldout_divergence"))
    assert heldout[12] < 0.8 * heldout[0]
    first, last = (dict(folder.series("distill", "kl_loss"))[step] for step in (1, 12))
    assert last < 0.8 * first
    names = {name for record in records(run) for name in record["values"]}
    assert not {name for name in names if "reward" in name and name != "reward_seconds"}
    assert not names & {"advantage_mean", "groups_without_signal", "policy_loss", "kl_coef"}
    answers = read_jsonl(run / "answers.jsonl")
    assert answers
    assert not any({"reward", "advantage"} & line.keys() for line in answers)
    for name in ("rollouts.jsonl", "followed.jsonl"):
        kept = read_jsonl(run / name)
        assert kept
        assert not any("reward" in line for line in kept)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Curves" in page
    assert "Win rates" not in page
    assert "Distributions" in page
    assert "Rewards are" not in page
    assert '<span class="score' not in page
    assert prompts(RunFiles(run), "distill")["win_rates"] == []
    assert replay(str(run), 2, rows=1) == 0
    shown = capsys.readouterr().out
    assert "answer 1, prompt from" in shown
    assert "reference" in shown
    assert not [word for word in ("score", "reward", "advantage", "nan") if word in shown]
    assert "kl-high" not in {alarm["alarm"] for alarm in folder.alarms}
    AutoModelForCausalLM.from_pretrained(run / "distill" / "actor")
    AutoModelForCausalLM.from_pretrained(run / "distill" / "ema")


@pytest.mark.parametrize("is_adapter", [False, True])
def test_an_evaluation_runs_policy_and_teacher_once(
    is_adapter: bool, tmp_path: Path, tiny_model: str, teacher: str, preferences: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its log-ratios are those of `actor_logprobs` and `reference_logprobs` to the last bit."""
    more = {"lora__rank": 4} if is_adapter else {}
    config = distilling(
        tmp_path, tiny_model, preferences, "" if is_adapter else teacher,
        stages=["grpo"], grpo__kl="exact-in-loss", grpo__reward_function=[REWARD],
        sampling__temperature=0.7, **more,
    )  # fmt: skip
    engine, trainer, made = made_by(config, tiny_model)
    with torch.no_grad():
        for name, parameter in engine.actor.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
        ours, _ = engine.actor_logprobs(made.batch, with_entropy=False)
        kept = []

        def states(model: Any, batch: Any, *more: Any) -> Tensor:
            kept.append(batch)
            return predictor_states(model, batch, *more)

        monkeypatch.setattr(divergence, "predictor_states", states)
        found, ratios = divergence.heldout_divergence(
            engine, made.batch, Divergence("exact-in-loss"), 4096
        )
    assert torch.equal(ratios, ours - engine.reference_logprobs(made.batch))
    assert (found > 0, len(kept)) == (True, 2)
    monkeypatch.setattr("tandem.training.evaluate._log_ratios", None)  # not called
    exact, asked = trainer.algorithm.divergence, list(made.rollout.prompts)
    counted = policy_metrics(engine, asked, config, trainer.reward_function, divergence=exact)
    assert {"heldout_divergence", "heldout_kl"} <= counted.keys()
    assert len(kept) == 4


def test_a_reward_model_that_nothing_reads_is_not_loaded_at_the_end(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    """The comparison of models needs none; `teacher` has no scalar head either."""
    config = distilling(
        tmp_path / "run", tiny_model, preferences, teacher, grpo__steps=1, reward_model=teacher
    )
    evaluation = json.loads((ran(config) / "evaluation.json").read_text())
    assert set(evaluation["models"]) == {"base", "distill"}


def test_the_card_says_who_taught_it(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    """And how the teacher came to be."""
    taught = ran(tiny_config(tmp_path / "sft", tiny_model, preferences, stages=["sft"])) / "sft"
    config = distilling(tmp_path / "run", tiny_model, preferences, str(taught), grpo__steps=1)
    card = (ran(config) / "distill" / "actor" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert any("On-policy distillation" in row and f"taught by {taught}" in row for row in rows)
    assert any("Supervised fine-tuning" in row and str(taught) in row for row in rows)


def test_conversations_with_an_environment_are_distilled(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    config = distilling(
        tmp_path / "run", tiny_model, preferences, teacher, grpo__steps=2,
        grpo__environment=f"{environments.__file__}:thrice",
        sampling__logit_bias=[f"{tiny_tokenizer().eos_token_id}:5"],
    )  # fmt: skip
    run = ran(config)
    values = [record["values"] for record in records(run) if record["step"] == 2][-1]
    assert values["kl_loss"] > 0
    assert values["conversation_answers"] > 1


def test_stops_change_nothing(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    config = distilling(
        tmp_path / "whole", tiny_model, preferences, teacher, stages=["sft", "distill"],
        grpo__ptx_data=[preferences], grpo__ptx_batch_size=4, grpo__ptx_target="reference",
        grpo__epochs=2, grpo__minibatch_size=4, save_every=1,
    )  # fmt: skip
    whole = ran(config)
    ran_with_stops(config, tmp_path / "again", [("distill", 2), ("distill", 3)])
    assert_equal_runs(tmp_path / "again", whole)


def test_adapters_off_over_ranks_are_the_reference_of_one(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    """Beside a reward, without a reference of its own; split weights have no whole embedding."""
    common: dict[str, Any] = {
        "stages": ["grpo"], "grpo__reward_function": REWARD, "grpo__kl": "exact-in-loss",
        "grpo__kl_coef": 0.3, "grpo__prompts_per_step": 4, "grpo__minibatch_size": 8,
        "grpo__steps": 2, "sampling__samples_per_prompt": 2, "lora__rank": 2,
        "grpo__actor": {"lora_learning_rate": 1e-2},
    }  # fmt: skip
    one = ran(tiny_config(tmp_path / "one", tiny_model, preferences, **common))
    split = tiny_config(
        tmp_path / "two", tiny_model, preferences, **common, parallel__actor_zero_stage=3
    )
    on_ranks(2, ranks_ran, split)
    assert_same_measures(tmp_path / "two", one)
    assert records(one)[-1]["values"]["kl_loss"] > 0


def nothing_stays_whole(world: World, config: RunConfig) -> None:
    """Rollouts find the teacher's weights in pieces."""
    rollout, found = RLHFEngine.rollout, list[str]()

    def watched(self: RLHFEngine, *args: Any, **kwargs: Any) -> Any:
        assert self.reference is not None
        found.extend(n for n, p in self.reference.named_parameters() if not isinstance(p, DTensor))
        return rollout(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RLHFEngine, "rollout", watched)
        ran(config, world=world)
    assert not found, f"whole on rank {world.rank}: {found}"


def test_a_split_teacher_is_in_pieces_while_answers_are_made(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    config = distilling(
        tmp_path / "run", tiny_model, preferences, teacher, parallel__actor_zero_stage=3,
        grpo__steps=2, grpo__eval_every=0, grpo__eval_prompts=0,
    )  # fmt: skip
    on_ranks(2, nothing_stays_whole, config)


def test_an_engine_for_it_has_no_reward_model(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    """A reward stage of the run may start from one, which has no head yet."""
    config = distilling(
        tmp_path, tiny_model, preferences, teacher, stages=["reward", "distill"],
        reward_model=tiny_model,
    )  # fmt: skip
    assert make_engine(config, tiny_model).scorer is None


@pytest.mark.parametrize(
    ("rank", "stage"),
    [
        (0, 3),
        pytest.param(2, 3, marks=pytest.mark.slow),
        pytest.param(0, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_change_nothing(
    rank: int, stage: int, tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    common: dict[str, Any] = {
        "lora__rank": rank, "grpo__normalization": "sequence", "grpo__kl": "jsd-in-loss",
        "grpo__ptx_data": [preferences], "grpo__ptx_batch_size": 4, "grpo__ptx_target": "reference",
    }  # fmt: skip
    config = distilling(tmp_path / "one", tiny_model, preferences, teacher, **common)
    one = ran(config)
    split = distilling(
        tmp_path / "two", tiny_model, preferences, teacher, **common,
        parallel__actor_zero_stage=stage, parallel__offload=["reference"],
    )  # fmt: skip
    on_ranks(2, ranks_ran, split)
    assert_same_measures(tmp_path / "two", one)
    theirs = weights_of(one, "distill")
    for name, value in weights_of(tmp_path / "two", "distill").items():
        torch.testing.assert_close(value, theirs[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reference_model": ""}, "reference_model must name the teacher of stage distill"),
        ({"grpo__kl": "k2-in-loss"}, "grpo.kl must be exact-in-loss, forward-exact-in-loss or jsd"),
        ({"dtype": "fp16"}, "dtype must be bf16 or fp32 where grpo.kl is exact-in-loss"),
        ({"grpo__kl_coef": 0.5}, "grpo.kl_coef must keep its default in distill"),
        ({"grpo__ptx_target": "reference"}, "grpo.ptx_target must be tokens unless grpo.kl is"),
        ({"grpo__jsd_beta": 0.3}, "grpo.jsd_beta must not be set where grpo.kl is exact-in-loss"),
        ({"grpo__reward_function": REWARD}, "grpo.reward_function must keep its default in dis"),
        ({"stages": ["distill", "kto"]}, "distill and kto"),
    ],
    ids=["no teacher", "an estimate", "fp16", "kl_coef", "no texts", "beta", "reward", "kto"],
)
def test_what_it_cannot_do_is_refused(
    changes: dict[str, Any], told: str, tmp_path: Path, tiny_model: str, teacher: str,
    preferences: str,
) -> None:  # fmt: skip
    config = distilling(tmp_path, tiny_model, preferences, teacher, **changes)
    with pytest.raises(ConfigError, match=told):
        check_config(config)


def test_its_placements_are_named_alike_everywhere() -> None:
    assert EXACT == EXACT_KL
    choices = get_args(get_type_hints(GRPOConfig)["kl"])
    assert set(EXACT) < set(choices)


def test_an_algorithm_is_refused_without_the_knobs_that_it_sets(
    tmp_path: Path, tiny_model: str, teacher: str, preferences: str
) -> None:
    config = distilling(tmp_path, tiny_model, preferences, teacher, grpo__algorithm="dapo")
    with pytest.raises(ConfigError, match=r"^grpo\.algorithm must keep its default") as told:
        check_config(config)
    assert "clip_high" not in str(told.value)
    config = distilling(
        tmp_path, tiny_model, preferences, teacher, grpo__algorithm="dapo", grpo__clip_low=0.3
    )
    with pytest.raises(ConfigError, match=r"grpo\.clip_low must keep its default"):
        check_config(config)
