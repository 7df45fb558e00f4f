"""Policy losses and advantages that knobs name, in runs of the stages."""

from __future__ import annotations

from pathlib import Path
from traceback import format_exception

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.load import check_config
from tandem.config.preferences import DPOConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.named_functions import named_function
from tandem.training.policy_functions import named_pair_losses, try_token_losses
from tests.tiny import tiny_config
from tests.training import letter_rewards
from tests.training.runs import ran, weights_of

REWARD = f"{letter_rewards.__file__}:starts_early"
LOSSES = """
import torch

def clipped(logprobs, old_logprobs, advantages, response_mask, *, clip=0.2):
    ratio = (logprobs - old_logprobs).exp()
    low = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return torch.where(response_mask, -low, torch.nan)

def changes(logprobs, old_logprobs, advantages, response_mask):
    advantages *= 2
    return -(logprobs - old_logprobs).exp() * advantages

def centered(logprobs, old_logprobs, advantages, response_mask):
    return -(logprobs - old_logprobs).exp() * (advantages - advantages.mean())

def broken(logprobs, old_logprobs, advantages, response_mask):
    return logprobs @ advantages

def summed(logprobs, old_logprobs, advantages, response_mask):
    return -(logprobs * advantages).sum(1)

def group_mean(made):
    scores = made.scores
    mean = torch.stack([scores[made.group == g].mean() for g in made.group])
    return (scores - mean)[:, None] * made.batch.response_mask, None

def of_a_graph(made):
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    return scale * group_mean(made)[0] / made.batch.response_mask, None

def with_returns(made):
    mask = made.batch.response_mask
    returns = made.rewards.flip(1).cumsum(1).flip(1) * mask
    return (returns - made.values) * mask, returns

def leaves(logprobs, old, advantages, mask):
    raise SystemExit(0)

def on_made_up_alone(logprobs, old, advantages, mask):
    return failing(logprobs) if len(mask) > 2 or mask.shape[1] > 4 else -logprobs * advantages

def failing(logprobs):
    return {}["key"]

def advantages_on_made_up_alone(made):
    if len(set(made.rollout.responses)) > len(set(map(len, made.rollout.responses))):
        raise SystemExit(3)
    return made.rewards, made.rewards

def divided(logprobs, old, advantages, mask):
    return -logprobs * advantages / (logprobs - old)

def rooted(logprobs, old, advantages, mask):
    return advantages * (logprobs - old).square().sqrt()

def above_the_mean(made):
    mask = made.batch.response_mask
    advantages = (made.scores - made.metrics["reward"])[:, None] * mask
    return advantages - made.metrics["kl_coef"] * mask, made.rewards

def by_group(made):
    table = made.scores.view(-1, 2)
    best = (made.scores == table.max(1).values.repeat_interleave(2)).float()
    words = torch.tensor([1 / len(text.split()) for text in made.rollout.responses])
    assert bool(words.isfinite().all())
    assert len({made.rollout.prompts[i].source.line for i in range(0, len(made), 2)}) > 2
    made.metrics["reward_mean/starts_early"]
    lengths = made.batch.response_mask.sum(1)
    assert bool((lengths[~made.rollout.finished] == 12).all())
    return (best + words)[:, None] * made.batch.response_mask, None

def logs(made):
    made.metrics["mine"] = 1.0
    return made.rewards, made.rewards

def two(made, other):
    return made.rewards, None

def per_answer(made):
    return made.scores, None

def takes_the_mean(made):
    made.rewards.sub_(made.rewards.mean())
    return made.rewards, made.rewards

def by_its_own(made):
    return made.advantages.clamp(-1, 1), made.rewards

def returns_by_its_own(made):
    return made.rewards, made.advantages + made.values

def by_level(made):
    levels = [prompt.columns["level"] for prompt in made.rollout.prompts]
    return made.rewards * torch.tensor(levels)[:, None], made.rewards
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(LOSSES)
    return path


@pytest.mark.parametrize("section", ["ppo", "grpo"])
def test_functions_that_say_what_the_knobs_say_give_the_same_weights(
    section: str, functions: Path, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    plain = {f"{section}__reward_function": REWARD, f"{section}__steps": 2}
    if section == "ppo":
        plain |= {"ppo__clip_ratio": 0.01, "ppo__whiten_advantages": False}
        own = {"ppo__loss_function": f"{functions}:clipped?clip=0.01", "ppo__clip_ratio": 0.2}
        own |= {"ppo__advantage_function": f"{functions}:with_returns"}
        own |= {"ppo__whiten_advantages": True}
    else:
        plain |= {"grpo__advantage_scale": "none"}
        own = {"grpo__advantage_function": f"{functions}:group_mean"}
        own |= {"grpo__loss_function": f"{functions}:clipped"}
        own |= {"grpo__advantage_scale": "group-std"}
    lines: list[str] = []
    ran(tiny_config(tmp_path / "plain", tiny_model, preferences, stages=[section], **plain))
    given = tiny_config(tmp_path / "own", tiny_model, preferences, stages=[section], **plain | own)
    ran(given, lines=lines)
    assert any(f"{functions}:clipped" in line for line in lines), "what a run does is said"
    expected = weights_of(tmp_path / "plain", section)
    for name, weight in weights_of(tmp_path / "own", section).items():
        assert torch.allclose(weight, expected[name], atol=1e-6), name
    assert any(
        not torch.equal(weight, load_file(Path(tiny_model) / "model.safetensors")[name])
        for name, weight in expected.items()
    )


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"loss_function": "FILE:changes"}, "must leave its arguments as they are"),
        ({"loss_function": "FILE:centered"}, "must give an answer the same loss whatever other"),
        ({"loss_function": "FILE:broken"}, "could not be used on two made-up answers: Runtime"),
        ({"loss_function": "FILE:summed"}, r"a loss for each token, \(2, 4\); got \(2,\)\. Return"),
        (
            {"loss_function": "FILE:divided"},
            r"must have finite losses; got .*(nan|inf).* made-up an",
        ),
        ({"loss_function": "FILE:leaves"}, "could not be used on two made-up answers: SystemExit"),
        ({"loss_function": "FILE:rooted"}, r"must have finite gradients; got .*nan.* made-up ans"),
        ({"loss_function": "FILE:clipt"}, "has no function clipt"),
        ({"loss_function": "FILE:clipped?clip=much"}, "clip must be a number; got 'much'"),
        ({"loss_function": "FILE:clipped?cut=1"}, "must have the option cut.*got clip"),
        ({"loss_function": "FILE"}, "must be file.py:function or module:function"),
        ({"advantage_function": "FILE:two"}, "must take one argument, the experience"),
        ({"advantage_function": "FILE:per_answer"}, r"made-up answers.*must be a pair.*got torch"),
        ({"advantage_function": "FILE:group_mean"}, r"made-up.*must be a pair.*the critic's ret"),
        ({"advantage_function": "FILE:takes_the_mean"}, "must leave its arguments as they are"),
        ({"advantage_function": "FILE:by_its_own"}, r"must give finite advantages; got \d+ that"),
        ({"advantage_function": "FILE:returns_by_its_own"}, r"must give finite returns; got \d+"),
        ({"advantage_function": "FILE:logs"}, "; it changed the experience's metrics"),
        ({"advantage_function": "FILE:by_level"}, "could not be used on 8 made-up.*KeyError: 'lev"),
    ],
)
def test_a_function_of_no_use_is_refused_before_any_stage(
    knobs: dict[str, str],
    message: str,
    functions: Path,
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
) -> None:
    more = {f"ppo__{k}": text.replace("FILE", str(functions)) for k, text in knobs.items()}
    more["ppo__reward_function"] = REWARD
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft", "ppo"], **more)
    with pytest.raises(ConfigError, match=message) as raised:
        ran(config)
    assert "ppo." in str(raised.value)
    assert not (tmp_path / "run").exists(), "nothing is written before it is refused"


@pytest.mark.parametrize(
    ("knob", "name", "message"),
    [
        (
            "loss_function",
            "on_made_up_alone",
            r"must not fail; it raised KeyError: 'key' \(functions.py, line \d+\)\. Fix it",
        ),
        ("advantage_function", "advantages_on_made_up_alone", "it raised SystemExit: 3 "),
    ],
)
def test_what_a_function_raises_in_a_run_is_told_in_one_line(
    knob: str, name: str, message: str, functions: Path, tmp_path: Path, tiny_model: str,
    preferences: str,
) -> None:  # fmt: skip
    more = {"ppo__reward_function": REWARD, f"ppo__{knob}": f"{functions}:{name}"}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["ppo"], **more)
    with pytest.raises(ConfigError, match=message) as raised:
        ran(config)
    assert str(raised.value).startswith(f"ppo.{knob} {functions}:{name} must not fail")
    assert (tmp_path / "run").exists(), "the run had begun"


def test_memory_that_runs_out_in_a_function_is_no_fault_of_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(chosen, rejected):\n    raise MemoryError('out of memory')\n")
    losses = named_pair_losses(DPOConfig(loss_function=f"{file}:f"))
    assert losses is not None
    with pytest.raises(MemoryError):
        losses(None, None)  # type: ignore[arg-type]


def test_debug_shows_where_a_function_failed(
    functions: Path, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    more = {"ppo__reward_function": REWARD, "ppo__loss_function": f"{functions}:broken"}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["ppo"], **more)
    with pytest.raises(ConfigError, match=r"Fix it \(--debug shows where\)") as raised:
        ran(config)
    assert f'File "{functions}", line' in "".join(format_exception(raised.value))


def test_knobs_that_a_function_replaces_must_not_be_set(
    functions: Path, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    more = {"ppo__loss_function": f"{functions}:clipped", "ppo__clip_ratio": 0.1}
    with pytest.raises(ConfigError, match=r"ppo\.clip_ratio must not be set where ppo\.loss_func"):
        check_config(tiny_config(tmp_path / "run", tiny_model, preferences, **more))
    more = {"grpo__advantage_function": f"{functions}:group_mean", "grpo__baseline": "none"}
    with pytest.raises(ConfigError, match=r"grpo\.baseline must not be set"):
        check_config(
            tiny_config(tmp_path / "run", tiny_model, preferences, stages=["grpo"], **more)
        )


def test_another_loss_in_the_same_file_is_another_run(
    functions: Path, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    more = {"ppo__reward_function": REWARD, "ppo__loss_function": f"{functions}:clipped"}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["ppo"], **more)
    ran(config)
    lines: list[str] = []
    ran(config, lines=lines)
    assert any("finished before" in line for line in lines)
    functions.write_text(LOSSES.replace("clip=0.2", "clip=0.1"))
    with pytest.raises(CheckpointError, match=r"changed: the loss function \(functions\.py\)"):
        ran(config)


def test_a_file_is_run_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path, count = tmp_path / "counted.py", tmp_path / "count"
    path.write_text(
        f"with open({str(count)!r}, 'a') as file: file.write('x')\n"
        "def f(): return 1\ndef g(): return 2\n"
    )
    assert [named_function(f"{path}:{name}", "knob")() for name in "fg"] == [1, 2]
    assert count.read_text() == "x"
    path.write_text(path.read_text().replace("return 1", "return 10"))
    assert named_function(f"{path}:f", "knob")() == 10


def test_the_functions_on_the_page_run_as_they_stand_there(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    page = (Path(__file__).parents[2] / "docs/ppo.md").read_text("utf-8")
    blocks = [block for block in page.split("```")[1::2] if "def " in block]
    path = tmp_path / "mine.py"
    path.write_text("\n".join(blocks[-2:]))
    more = {
        "grpo__reward_function": REWARD,
        "grpo__steps": 1,
        "grpo__loss_function": f"{path}:gated?negative=1.1",
        "grpo__advantage_function": f"{path}:group_means",
    }
    run = ran(tiny_config(tmp_path / "run", tiny_model, preferences, stages=["grpo"], **more))
    assert (run / "grpo" / "actor" / "model.safetensors").is_file()


def test_a_loss_over_one_answer_at_a_time_may_sum_over_it() -> None:
    def per_answer(logprobs, old, advantages, mask):  # type: ignore[no-untyped-def]
        ratio = (logprobs - old).masked_fill(~mask, 0).sum(1, keepdim=True).exp()
        return -ratio * advantages / mask.sum(1, keepdim=True)

    try_token_losses(per_answer, "sequence ratio")


def test_what_a_loss_gives_beside_the_answers_may_be_anything() -> None:
    try_token_losses(lambda new, old, a, mask: -new * a / mask.float(), "by the mask")


def test_advantages_may_be_anything_beside_the_answers_and_come_of_a_graph(
    functions: Path, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    more = {"grpo__reward_function": REWARD, "grpo__steps": 1, "grpo__epochs": 2}
    weights = []
    for name in ("group_mean", "of_a_graph"):
        more["grpo__advantage_function"] = f"{functions}:{name}"
        run = tiny_config(tmp_path / name, tiny_model, preferences, stages=["grpo"], **more)
        weights.append(weights_of(ran(run), "grpo"))
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


def test_the_trial_has_the_figures_that_a_rollout_has(
    functions: Path, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    more = {"ppo__reward_function": REWARD, "ppo__steps": 1}
    more |= {"ppo__advantage_function": f"{functions}:above_the_mean"}
    run = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["ppo"], **more)
    assert (ran(run) / "ppo" / "actor").is_dir()


def test_the_trial_looks_like_a_rollout_of_the_run(
    functions: Path, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    more = {"grpo__reward_function": REWARD, "grpo__steps": 1, "sampling__max_new_tokens": 12}
    more |= {"grpo__advantage_function": f"{functions}:by_group"}
    more |= {"sampling__samples_per_prompt": 2}
    run = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["grpo"], **more)
    assert (ran(run) / "grpo" / "actor").is_dir()
