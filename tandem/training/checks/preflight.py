"""Checks before the first stage of what would fail only in a later one."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from operator import attrgetter

from tandem.config.conversations import answer_tokens
from tandem.config.engine import engine_settings
from tandem.config.rules import has_reference, selecting, warmup_problem
from tandem.config.schema import PPOConfig, RLConfig, RunConfig, rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import in_order, leaving, of_family, rl_stage
from tandem.config.updates import minibatch_size, num_rollouts
from tandem.data.causes import why_none
from tandem.engine.shard_plan import check_layout
from tandem.errors import ConfigError, ModelError
from tandem.generation.request_maker import form_problems
from tandem.models.checkpoint_ref import checkpoint_ref_of, same_base
from tandem.models.rope import longrope_border
from tandem.models.slice_plans import check_sliceable
from tandem.models.source import load_config, locate, whole_family
from tandem.parallel.tensor import check_divides
from tandem.parallel.world import World
from tandem.predict.models import shape_for
from tandem.rewards.binding import columns_problem
from tandem.rewards.columns import ANSWER
from tandem.rewards.scoring import named
from tandem.training.checks.trained_tokens import token_problems
from tandem.training.reward_function import columns_given
from tandem.training.stage_data import StepRows, positions

_LARGE = 10**9
_LARGEST_FLOAT32 = 3.4028234663852886e38


def check_rows(config: RunConfig, rows: StepRows, policy: str, reward: str) -> None:
    """Check that every stage has rows, that every row fits its model's positions, and that a reward
    function can be called with the rows' columns, and that named tokens are tokens.

    Args:
        policy, reward: the models to load.
    Raises:
        ConfigError: all that is wrong, at once.
    """
    problems = [*_empty_steps(config, rows), *_without_evaluation(config, rows)]
    limit = positions(policy, config)
    longest_answer = config.sampling.max_new_tokens
    for stage in of_family(config.stages, "supervised", "pairs"):
        room = limit if stage.leaves == "policy" else positions(reward, config)
        problems += _too_long(f"rows of stage {stage.name}", rows.of(stage), room)
    problems += _too_long(f"rows of {rl_stage(config.stages).section}.ptx_data", rows.ptx, limit)
    scores, rl = leaving(config.stages, "reward model"), of_family(config.stages, "rl")
    scored = min(config.reward.normalize_prompts, len(rows.prompts))
    if scores and scored * config.sampling.samples_per_prompt == 1:
        problems.append(
            "reward.normalize_prompts must be 0 or find two prompts at least, whose scores differ; "
            f"got 1 ({len(rows.prompts)} prompts, reward.normalize_prompts "
            f"{config.reward.normalize_prompts}). Use more, or set reward.normalize_prompts 0"
        )
    longest = max(map(len, rows.prompts), default=0)
    if scores or rl:
        problems += answers_too_long(longest, longest_answer, limit)
        problems += form_problems(config.sampling, rows.renderer)
    followed = answer_tokens(config, longest, limit) if rl else longest_answer
    problems += _beyond_named(config, rows, longest + followed)
    if rl:
        own = "" if reward == policy and not scores else reward
        problems += _beyond_the_reward_models(config, longest, followed, own)
    border = _rope_border(policy, config)
    shortest = min(map(len, [*rows.prompts, *rows.heldout_prompts]), default=0)
    if rl and border is not None and shortest <= border < longest + followed:
        problems.append(
            f"prompts and answers of {rl[0].name} must stay within the {border} tokens past which "
            "this model's rope (longrope) changes for all tokens of a sequence, so that what an "
            "answer was drawn from is not what is trained; got up to "
            f"{longest} + {followed}. Lower "
            "dataset.max_prompt_tokens or sampling.max_new_tokens"
        )
    if rl:
        problems += columns_problems(config, rows) + _too_long_a_warm_up(config, rows)
    problems += token_problems(config, rows)
    problems += _unusable_biases(config, policy)
    if problems:
        raise ConfigError("; ".join(problems))


def _beyond_named(config: RunConfig, rows: StepRows, longest: int) -> list[str]:
    """What keeps rows from fitting the positions of a reference or critic that is named.

    Args:
        longest: tokens of the longest prompt and answer.
    """
    problems = []
    for role, model in (("reference", config.reference_model), ("critic", config.critic_model)):
        limit = positions(model, config) if model else None
        for stage in in_order(config.stages):
            has_role = has_reference(config, stage) if role == "reference" else stage.has_critic
            if limit is None or not has_role:
                continue
            found = longest if stage.family == "rl" else max(map(len, rows.of(stage)), default=0)
            if found > limit:
                problems.append(
                    f"sequences of stage {stage.name} must fit the {role} model's {limit} "
                    f"positions; got up to {found} tokens. Lower dataset.max_tokens, "
                    "dataset.max_prompt_tokens or sampling.max_new_tokens"
                )
    return problems


def _beyond_the_reward_models(
    config: RunConfig, prompt: int, answer: int, reward: str
) -> list[str]:
    """What keeps answers from fitting the positions of what scores them.

    Args:
        prompt, answer: tokens of the longest. reward: the model that the run's reward model is, or
            starts from; "" for none.
    """
    rl = rl_section(config)
    models = [reward] if reward and rl.reward_model_weight > 0 else []
    models += [model.source for model in weighted_models(config.scoring.reward_models)]
    limits = [limit for model in models if (limit := positions(model, config)) is not None]
    if not limits or prompt + answer <= min(limits):
        return []
    knob = "sampling.max_new_tokens"
    if rl.converses:
        knob = f"{rl_stage(config.stages).section}.max_conversation_tokens"
    problem = (
        f"the longest prompt and what follows it must fit the reward model's {min(limits)} "
        f"positions; got {prompt} + {answer}. Lower dataset.max_prompt_tokens or {knob}"
    )
    return [problem]


def _unusable_biases(config: RunConfig, policy: str) -> list[str]:
    """What of `sampling.logit_bias` the policy's sampler cannot use."""
    biases = config.sampling.logit_biases()
    if not biases:
        return []
    too_large = [(token, bias) for token, bias in biases.items() if bias > _LARGEST_FLOAT32]
    if too_large:
        token, bias = too_large[0]
        problem = (
            f"sampling.logit_bias must be float32 numbers or -inf; got {bias:g} for token {token}. "
            "A bias of 1000 leaves no other token"
        )
        return [problem]
    largest = max(biases)
    found = load_config(locate(policy), trust_remote_code=config.trust_remote_code)
    vocabulary = getattr(found.get_text_config(), "vocab_size", None)
    if vocabulary is None or largest < vocabulary:
        return []
    return [
        (
            f"sampling.logit_bias must name tokens below the model's {vocabulary}; got {largest}. "
            "Use ids of its tokenizer"
        )
    ]


def _too_long_a_warm_up(config: RunConfig, rows: StepRows) -> list[str]:
    """A critic's warm-up of all rollouts, whose number follows from the prompts."""
    rl, stages = rl_section(config), of_family(config.stages, "rl")
    if not (isinstance(rl, PPOConfig) and stages[0].reads("ppo.critic_warmup_steps")):
        return []
    problem = warmup_problem(rl, num_rollouts(rl, len(rows.prompts))) if rows.prompts else ""
    return [problem] if problem else []


def check_parallel(config: RunConfig, world: World, policy: str) -> None:
    """Check how models will be placed on the ranks, before any is loaded.

    Args:
        policy: the actor to load.
    Raises:
        ConfigError, ModelError: PPO would be refused after the stages before it.
    """
    check_layout(engine_settings(config), world)
    parts = config.parallel.inference_tp_size
    if parts > 1:
        check_divides(world, parts)
        source = locate(policy)
        found = load_config(source, trust_remote_code=config.trust_remote_code)
        check_sliceable(found, parts, config.parallel.frozen_weights)
    if config.parallel.shared_base:
        _require_one_base(config, policy)


def _require_one_base(config: RunConfig, policy: str) -> None:
    """Refuse a shared base where a given model that PPO or its like loads does not start from the
    policy's."""
    if not of_family(config.stages, "rl"):
        return
    given = {"--critic-model": config.critic_model}
    if leaving(config.stages, "reward model") or rl_section(config).reward_model_weight > 0:
        given["--reward-model"] = config.reward_model
    base = checkpoint_ref_of(policy, unmerged=True).base
    for flag, model in given.items():
        if model and not same_base(checkpoint_ref_of(model, unmerged=True).base, base):
            raise ConfigError(
                "--shared-base must find one model under actor, critic and reward model; got "
                f"{flag} {model!r} and {base!r} under the actor. Start both "
                "from one model, or leave --shared-base off."
            )


def idle_ranks(config: RunConfig, world: World) -> list[str]:
    """A line for each stage whose batches have fewer rows than there are ranks."""
    groups = world.size // config.parallel.inference_tp_size
    batches = [
        (stage.name, f"{stage.section}.{knob}", getattr(config, stage.section), knob, ranks)
        for stage in in_order(config.stages)
        for knob, ranks in (
            (("minibatch_size", world.size), ("prompts_per_step", groups))
            if stage.family == "rl"
            else (("batch_size", world.size),)
        )
    ]
    return [
        f"{stage}: {knob} {rows} leaves {ranks - rows} of {ranks} "
        f"{'ranks' if ranks == world.size else 'groups of ranks'} without a row at a time: they "
        f"wait for the others. Raise {knob} to a multiple of {ranks}, or use fewer ranks."
        for stage, knob, section, name, ranks in batches
        if (rows := getattr(section, name) or minibatch_size(config)) < ranks
    ]


def decoders_alone(config: RunConfig, policy: str, reward: str) -> list[str]:
    """A line for each model that has image or audio parts, which are left out.

    Args:
        policy, reward: the models to load.
    """
    lines = []
    for model in dict.fromkeys(name for name in (policy, reward) if name):
        if not (family := whole_family(locate(model))):
            continue
        loaded = load_config(locate(model), trust_remote_code=config.trust_remote_code)
        lines.append(
            f"note: of {model} ({family}) the text decoder alone is loaded, trained and saved, as "
            f"a {loaded.model_type} checkpoint; docs/models.md says how to put it back beside the "
            "image or audio parts"
        )
    return lines


def rates_for_large_models(config: RunConfig, policy: str, reward: str) -> list[str]:
    """A line for each small model that is about to be trained at default learning rates, which suit
    models of billions of weights and teach a small one next to nothing. Adapters have rates of
    their own: a line for each that was left alone where the other was set.

    Args:
        policy, reward: the models to load.
    """
    default = RunConfig()
    notes = _rates_of_adapters(config, default)
    flags: dict[str, list[str]] = {}
    for stage in in_order(config.stages):
        if config.lora.of(stage.trains[0]).rank:
            continue
        name = stage.section if stage.family != "rl" else f"{stage.section}.actor"
        rates = [attrgetter(name)(of).learning_rate for of in (config, default)]
        if stage.taught and rates[0] == rates[1]:
            model = policy if stage.leaves == "policy" else reward
            flags.setdefault(model, []).append(f"--{name}.learning-rate {stage.taught:g}")
    weights = {model: _weights(model, config) for model in flags}
    return notes + [
        f"note: the default learning rates suit models of billions of weights; {model} has "
        f"{weights[model] / 1e6:,.3g} million. {' '.join(given)} taught one of 135 million"
        for model, given in flags.items()
        if weights[model] < _LARGE
    ]


def _rates_of_adapters(config: RunConfig, default: RunConfig) -> list[str]:
    notes = []
    for stage in in_order(config.stages):
        for role in stage.trains:
            if not config.lora.of(role).rank:
                continue
            name = f"{stage.section}.{role}" if stage.family == "rl" else stage.section
            ours, theirs = attrgetter(name)(config), attrgetter(name)(default)
            if ours.learning_rate != theirs.learning_rate and (
                ours.lora_learning_rate == theirs.lora_learning_rate
            ):
                notes.append(
                    f"note: adapters train at {name}.lora_learning_rate, "
                    f"{ours.lora_learning_rate:g}; {name}.learning_rate, "
                    f"{ours.learning_rate:g}, is of other weights. To change theirs give "
                    f"--{name}.lora-learning-rate"
                )
    return notes


def _weights(path: str, config: RunConfig) -> float:
    """How many weights a model has; infinite where that cannot be told."""
    found = load_config(locate(path), trust_remote_code=config.trust_remote_code)
    try:
        return shape_for(found.to_dict()).parameters
    except ModelError:
        return math.inf


def columns_problems(config: RunConfig, rows: StepRows) -> list[str]:
    """What keeps reward functions from being called with the columns of the prompts."""
    functions = rl_section(config).reward_function
    if not functions or not (rows.prompts or rows.heldout_prompts):
        return []
    account, wanted = columns_given(config, rows), config.scoring.answer_column
    columns = account.names
    if wanted != ANSWER and not account.num_answers:
        problem = (
            "scoring.answer_column must be a column of the prompts' rows that is not read as the "
            "prompt or its answer, or a path into one such as reward_model.ground_truth; got "
            f"{wanted!r}, which no row has (their other columns: {', '.join(columns) or 'none'}). "
            "Correct it"
        )
        return [problem]
    found = (columns_problem(call, columns, spec.label) for spec, call in named(functions))
    return [problem for problem in found if problem]


def _empty_steps(config: RunConfig, rows: StepRows) -> list[str]:
    problems = []
    for stage in in_order(config.stages):
        if not rows.of(stage):
            advice = "See the data account above, --data-split, and the lengths"
            causes = why_none(rows.ledger, stage.share, labelled=stage.labelled) or [advice]
            if stage.share == "prompts" and rl_section(config).tools:
                section = rl_stage(config.stages).section
                room = f"dataset.max_prompt_tokens is {config.dataset.max_prompt_tokens}"
                causes.append(f"The schemas of {section}.tools are in each prompt, and {room}")
            told = f"stage {stage.name} must have at least one row; got none"
            problems.append(". ".join((told, *causes)))
        section = getattr(config, stage.section)
        mixes = isinstance(section, RLConfig) and stage.reads(f"{stage.section}.ptx_data")
        if mixes and section.ptx_data and section.ptx_coef > 0 and not rows.ptx:
            problems.append(
                f"{stage.section}.ptx_data must have a text to mix in; got none. See the data "
                "account above, or give --dataset.on-long-row truncate"
            )
    return problems


def _without_evaluation(config: RunConfig, rows: StepRows) -> list[str]:
    more = f"more data, or raise dataset.heldout (now {config.dataset.heldout:g})"
    if config.eval_data:
        more = "such rows in eval_data"
    return [
        f"{stage.section}.{asked} must have held-out rows, whose evaluations it compares; got none "
        f"of stage {stage.name}. Give {more}, or remove {stage.section}.{asked}"
        for stage in in_order(config.stages)
        if (asked := selecting(getattr(config, stage.section))) and not rows.heldout_of(stage)
    ]


def _too_long(what: str, rows: Sequence[Sized], limit: int | None) -> list[str]:
    longest = max(map(len, rows), default=0)
    if limit is None or longest <= limit:
        return []
    return [
        (
            f"{what} must fit the model's {limit} positions; got {longest} tokens. "
            f"Set dataset.max_tokens to at most {limit}"
        )
    ]


def answers_too_long(prompt: int, answer: int, limit: int | None, of: str = "model") -> list[str]:
    """What keeps the longest prompt and answer, in tokens, from fitting a model's positions."""
    if limit is None or prompt + answer <= limit:
        return []
    problem = (
        f"the longest prompt and sampling.max_new_tokens must fit the {of}'s {limit} positions; "
        f"got {prompt} + {answer}. Lower dataset.max_prompt_tokens or sampling.max_new_tokens"
    )
    return [problem]


def _rope_border(path: str, config: RunConfig) -> int | None:
    found = load_config(locate(path), trust_remote_code=config.trust_remote_code)
    return longrope_border(found.get_text_config())
