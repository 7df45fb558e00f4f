"""`tandem sample`: a policy's answers to prompts, scored and written, a few prompts at a time.

Best-of-n rows for SFT: rejection sampling, arXiv:2112.09332 and RAFT, arXiv:2304.06767. Best
against worst for DPO on a policy's own answers: arXiv:2401.10020, arXiv:2404.19733.

A prompt's answers are keyed by the seed, its number among the prompts and the sample's, so they
depend neither on how many are generated at once nor on the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from tandem.checkpoint.beside import verify_beside
from tandem.checkpoint.folder import together
from tandem.config.conversations import CONVERSATION_KNOBS, answer_tokens
from tandem.config.engine import EngineSettings, engine_settings
from tandem.config.load import config_knobs
from tandem.config.schema import RunConfig, rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import rl_stage
from tandem.data.causes import why_none
from tandem.data.render import Renderer
from tandem.devices import resolve_device
from tandem.engine.allocator import keep_freed_memory
from tandem.engine.placement import Placement
from tandem.engine.rollouts import rollout_of
from tandem.engine.scoring import RewardScorer, place_scorer
from tandem.errors import ConfigError, Stopped
from tandem.generation.limits import max_positions
from tandem.generation.request_maker import form_problems
from tandem.generation.stops import Stops
from tandem.metrics.console import StageConsole
from tandem.models.checkpoint_ref import model_folders
from tandem.parallel.watchdog import note
from tandem.parallel.world import World, launched
from tandem.rewards.scoring import RewardFunctions
from tandem.text import ignore_line, visible
from tandem.training.checks.agreement import require_one_configuration
from tandem.training.checks.conversation_trial import check_environment
from tandem.training.checks.left_out import left_out_lines
from tandem.training.checks.preflight import answers_too_long, columns_problems
from tandem.training.conversations import ConversationSource, conversation_source, given_turns
from tandem.training.provenance import Identity
from tandem.training.reward_function import check_rewards, columns_given, rewards_of
from tandem.training.run_stages import ledger_lines
from tandem.training.sample.file import Progress, SampleFile
from tandem.training.sample.flags import (
    REWARDS,
    SampleSettings,
    scores,
    scoring_model,
)
from tandem.training.sample.rows import SampledAnswer, row_of
from tandem.training.sample.summary import summary
from tandem.training.scored_answers import score_answers
from tandem.training.signals import StopSignals
from tandem.training.stage_data import StepRows, positions, prepare_rows
from tandem.types import PromptRow, Rollout

_DEPENDS_ON = (
    *("data", "seed", "hybrid_engine", "parallel.frozen_weights"),
    *("dataset.max_prompt_tokens", "dataset.on_long_row"),
)
"""The knobs that answers depend on, beside those of `sampling`."""
_REWARD_DEPENDS_ON = (*REWARDS, "scoring.on_none", "scoring.on_failure", "scoring.answer_column")


def sample(
    settings: SampleSettings,
    world: World | None = None,
    print_line: Callable[[str], None] = print,
) -> Progress:
    """Write the rows that are still to come.

    Args:
        world: the ranks that share the prompts. None: those that torchrun's environment names, or
            one process.
        print_line: shows a line to the user, on the first rank.
    Returns:
        what was counted, over all runs of the command; the same on every rank.
    Raises:
        ConfigError, DataError, ModelError: models, data or functions cannot be used.
        CheckpointError: the file cannot be continued or written.
        Stopped: a signal asked for it; what is answered is written.
    """
    keep_freed_memory()
    world = world or launched(settings.config.parallel, resolve_device(settings.config.device))
    require_one_configuration(settings.config, world)
    say = print_line if world.is_first else ignore_line
    with StopSignals(say, "the prompts that it is answering") as stops:
        rows = _prompts(settings.config, world, say)
        file = SampleFile(
            settings.output, _made_from(settings, rows, world), num_prompts=len(rows.prompts)
        )
        with closing(file):
            together(lambda: file.open() if world.is_first else None, file.path, world)
            file.progress = world.all_gather_object(file.progress)[0]
            if file.is_finished:
                say(f"{visible(str(file.path))}: finished before")
            else:
                _Sampling(settings, rows, world, say, stops).fill(file)
                # Rows and bytes are counted by the first rank, which writes them.
                file.progress = world.all_gather_object(file.progress)[0]
            for line in summary(settings, file.progress):
                say(line)
            return file.progress


def _prompts(config: RunConfig, world: World, say: Callable[[str], None]) -> StepRows:
    """The prompts in the order of their files, checked against the models."""
    reward = scoring_model(config)
    for model in filter(None, (config.actor_model, reward)):
        for folder in model_folders(model):
            verify_beside(folder, world=world)
    say(f"reading {', '.join(config.data)}")
    rows = prepare_rows(config, config.actor_model, reward or config.actor_model, shuffle=False)
    limit = positions(config.actor_model, config)
    for line in ledger_lines(rows) + left_out_lines(config, rows.ledger, rows.lengths, limit):
        say(line)
    if not rows.prompts:
        told = [
            "tandem sample must have at least one prompt; got none",
            *why_none(rows.ledger, "prompts"),
        ]
        raise ConfigError(". ".join([*told, "See the data account above"]))
    longest, new = max(map(len, rows.prompts)), config.sampling.max_new_tokens
    problems = answers_too_long(longest, new, limit)
    if reward:
        new = answer_tokens(config, longest, limit)
        problems += answers_too_long(longest, new, positions(reward, config), "reward model")
    problems += form_problems(config.sampling, rows.renderer)
    if problems := [*problems, *columns_problems(config, rows)]:
        raise ConfigError("; ".join(problems))
    return rows


def _made_from(settings: SampleSettings, rows: StepRows, world: World) -> dict[str, object]:
    """All that the rows of the file depend on."""
    config, choice = settings.config, settings.choice
    identity = Identity(config, settings.output.parent, world)
    reward, functions = scoring_model(config), rl_section(config).reward_function
    sampling = (name for name, _ in config_knobs() if name.startswith("sampling."))
    made_from: dict[str, object] = {
        **identity.knobs((*_DEPENDS_ON, *sampling)),
        "device": world.device.type,
        "dtype": str(Placement(engine_settings(config), world).dtype).removeprefix("torch."),
        "the model": identity.files.of_model(config.actor_model),
        "the rows": {a.name: a.fingerprint for a in rows.ledger.datasets.values()},
        "--write": choice.write,
        "--min-margin": choice.min_margin,
        "--min-reward": choice.min_reward,
        "--keep-cut-off": choice.keep_cut_off,
    }
    made_from |= identity.of_template() | identity.of_schema()
    if reward or functions:
        made_from |= identity.knobs(_REWARD_DEPENDS_ON)
    if reward:
        made_from["the reward model"] = identity.files.of_model(reward)
        made_from |= identity.knobs(["scoring.reward_models"])
        for further in weighted_models(config.scoring.reward_models):
            made_from[f"the files of {further.source}"] = identity.files.of_model(further.source)
    if functions:
        made_from["the reward function"] = identity.files.reward_function()
    if rl_section(config).converses:
        section = rl_stage(()).section
        made_from |= identity.knobs(f"{section}.{name}" for name in CONVERSATION_KNOBS)
        made_from |= identity.files.conversations()
    return made_from


@dataclass(frozen=True, slots=True)
class _Models:
    """What answers and what scores."""

    policy: PreTrainedModel
    scorer: RewardScorer | None
    rewards: RewardFunctions | None
    conversations: ConversationSource | None


class _Sampling:
    """Answers the prompts that are left, in their order."""

    def __init__(
        self,
        settings: SampleSettings,
        rows: StepRows,
        world: World,
        say: Callable[[str], None],
        stops: StopSignals,
    ) -> None:
        self._settings, self._rows, self._world = settings, rows, world
        self._say, self._stops = say, stops
        self._config = settings.config
        self._engine: EngineSettings = engine_settings(settings.config)
        self._chunk = rl_section(settings.config).prompts_per_step

    def fill(self, file: SampleFile) -> None:
        """Write the rows of all prompts that are left.

        Raises:
            Stopped: a signal asked for it; what is answered is written.
        """
        total, progress = len(self._rows.prompts), file.progress
        if progress.prompts:
            self._say(f"continuing after {progress.prompts:,} of {total:,} prompts")
        with ExitStack() as stack:
            models = self._models(stack)
            console = None
            if self._world.is_first:
                console = StageConsole(rl_stage(()).name, total, progress.prompts, label="sample")
                stack.callback(console.close)
            self._stops.deferring = True
            while progress.prompts < total:
                start = progress.prompts
                end = min(total, start + self._chunk)
                note(f"sample, prompts {start + 1} to {end}")
                began = time.monotonic()
                numbers = self._answer(models, file, range(start, end))
                if console is not None:
                    console.line(end, {**numbers, "seconds/step": time.monotonic() - began})
                number = int(self._world.all_reduce_max([self._stops.requested])[0])
                if number and end < total:
                    raise Stopped(number, f"after {end:,} of {total:,} prompts, which are written")

    def _models(self, stack: ExitStack) -> _Models:
        """The models and functions, ready; functions are tested first."""
        config, world = self._config, self._world
        names = rl_section(config).reward_function
        columns = columns_given(config, self._rows).names
        check_environment(config, self._rows, columns, world, self._say)
        check_rewards(names, config, self._rows, world, self._say, trains=False)
        rewards = rewards_of(names, config.scoring, self._say, columns)
        if rewards is not None:
            stack.callback(rewards.close)
        placement = Placement(self._engine, world)
        scorer, source = None, scoring_model(config)
        self._say(f"policy: {visible(config.actor_model)}")
        if scores := [*filter(None, [source]), *config.scoring.reward_models, *names]:
            self._say(f"reward: {visible(', '.join(scores))}")
        policy = placement.policy(config.actor_model, trained=False)
        if source:
            scorer = place_scorer(placement, source, self._rows.reward_tokenizer)
            for line in (scorer.note_on_text(self._rows.renderer), scorer.note_on_units()):
                if line:
                    self._say(line)
        conversations = conversation_source(
            config, self._rows.renderer, columns=columns, world=world, print_line=self._say
        )
        if conversations is not None:
            stack.callback(conversations.close)
            self._say(conversations.describe(max_positions(policy)))
        return _Models(policy, scorer, rewards, conversations)

    def _answer(self, models: _Models, file: SampleFile, numbers: range) -> dict[str, float]:
        """Answer the prompts of these numbers and write their rows; what to show of them."""
        prompts = self._rows.prompts[numbers.start : numbers.stop]
        began = time.monotonic()
        rollout = self._rollout(models, prompts, numbers)
        seconds = time.monotonic() - began
        rewards = self._rewards(models, rollout)
        progress, choice = file.progress, self._settings.choice
        progress.seconds += seconds
        progress.longest = max(progress.longest, int(rollout.batch.lengths().max()))
        written = []
        for prompt, answers in _by_prompt(rollout, rewards, len(prompts), self._rows.renderer):
            self._count(progress, answers)
            place = str(prompt.source)
            row, reason = row_of(given_turns(prompt), place, answers, choice, prompt.tools)
            if row is None:
                progress.leave(reason)
            else:
                written.append(row)
        progress.prompts = numbers.stop
        together(
            lambda: file.add(written) if self._world.is_first else None, file.path, self._world
        )
        scored = [reward for reward in rewards if reward is not None]
        shown = {
            "response_tokens": rollout.batch.num_response_tokens / len(rollout),
            "eos_rate": float(rollout.finished.float().mean()),
        }
        return shown | ({"reward": sum(scored) / len(scored)} if scored else {})

    def _rollout(self, models: _Models, prompts: list[PromptRow], numbers: range) -> Rollout:
        """The policy's answers, or conversations that begin with them."""
        stops = Stops.of(self._rows.renderer)
        answers = partial(
            rollout_of, models.policy, prompts, self._engine, stops, step=0, numbers=numbers
        )
        if models.conversations is None:
            return answers()
        limit = self._config.sampling.max_new_tokens
        with models.conversations.talking(limit, max_positions(models.policy)) as talk:
            return answers(conversing=talk)

    def _rewards(self, models: _Models, rollout: Rollout) -> list[float | None]:
        """Of each answer, without penalties and clips; None where nothing scored it."""
        if models.scorer is None and models.rewards is None:
            return [None] * len(rollout)
        config = self._config
        scored = score_answers(
            rollout,
            models.scorer,
            self._rows.renderer,
            rl_section(config),
            models.rewards,
            self._world,
        )
        scored.tell_failed_models(self._say)
        values = scored.mixed.masked_fill(~scored.is_scored, torch.nan).float().cpu().numpy()
        # The shortest decimals that are the same float32: 0.1, not 0.10000000149.
        return [float(str(value)) if np.isfinite(value) else None for value in values]

    def _count(self, progress: Progress, answers: list[SampledAnswer]) -> None:
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        progress.answers += len(answers)
        progress.tokens += sum(answer.tokens for answer in answers)
        progress.cut_off += sum(not answer.finished for answer in answers)
        progress.blank += sum(answer.is_blank for answer in answers)
        progress.scored += len(rewards)
        progress.rewards += sum(rewards)
        if scores(self._config):
            progress.unscored += len(answers) - len(rewards)
        choice = self._settings.choice
        among = (
            rewards
            if choice.write == "all"
            else [a.reward or 0.0 for a in choice.candidates(answers)]
        )
        if among:
            progress.num_among += len(among)
            progress.among += sum(among)
            progress.num_best += 1
            progress.best += max(among)


def _by_prompt(
    rollout: Rollout, rewards: list[float | None], num_prompts: int, renderer: Renderer
) -> Iterator[tuple[PromptRow, list[SampledAnswer]]]:
    """Each prompt with its answers, in their order."""
    tokens = rollout.batch.on_host().response_mask.sum(dim=1).tolist()
    finished = rollout.finished.tolist()
    samples = len(rollout) // num_prompts
    for start in range(0, len(rollout), samples):
        places = range(start, start + samples)
        yield (
            rollout.prompts[start],
            [
                SampledAnswer(
                    rollout.responses[i],
                    rewards[i],
                    finished[i],
                    tokens[i],
                    asked.messages[len(given_turns(asked)) :],
                    renderer.spoken(rollout.responses[i], asked.tools, asked.messages).turn,
                )
                for i in places
                for asked in (rollout.prompts[i],)
            ],
        )
