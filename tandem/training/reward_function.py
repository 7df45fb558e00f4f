"""Reward functions on a rollout: called once for all ranks, their scores as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.config.schema import RunConfig
from tandem.config.scoring import ScoringConfig
from tandem.data.render import Renderer
from tandem.errors import ConfigError, DataError, StoppedWaiting
from tandem.objectives.rewards import combined_scores
from tandem.parallel.world import World
from tandem.rewards.calling import RewardFunction
from tandem.rewards.columns import ColumnAccount, account_of
from tandem.rewards.per_token import mean_of_tokens, weighted_tokens
from tandem.rewards.scoring import Answers, FunctionScores, GivenFunction, RewardFunctions
from tandem.rewards.selftest import ReferenceRow, self_test
from tandem.training.checks.agreement import refused_together
from tandem.training.conversations import as_dicts, new_messages
from tandem.training.rollout_rows import answer_masks
from tandem.training.stage_data import StepRows
from tandem.types import PromptRow, Rollout

GivenRewards = RewardFunctions | RewardFunction | str | Sequence[GivenFunction]
"""What a reward may be given as: one function or several, by name or as they are."""


@dataclass(frozen=True, slots=True)
class RewardColumns:
    """Each reward function's scores of a rollout's answers.

    values: (B, K) float32, NaN where there is none. functions: K, what is known of each.
    """

    values: Tensor
    functions: tuple[FunctionScores, ...]

    @staticmethod
    def joined(parts: Sequence[RewardColumns]) -> RewardColumns:
        """The scores of several rollouts' answers by the same functions."""
        by_function = zip(*(part.functions for part in parts), strict=True)
        values = torch.cat([part.values for part in parts])
        return RewardColumns(values, tuple(map(FunctionScores.joined, by_function)))

    @property
    def weights(self) -> list[float]:
        """Of the functions among themselves."""
        return [function.weight for function in self.functions]

    @property
    def total(self) -> Tensor:
        """(B,) float32: the weighted sum; NaN where no function gives a number."""
        return combined_scores(self.values, self.weights)

    @property
    def of_tokens(self) -> tuple[tuple[float, ...], ...]:
        """What functions gave each token of the answers, as `weighted_tokens`."""
        parts = [(f.weight, f.tokens) for f in self.functions if f.tokens is not None]
        return weighted_tokens(parts, len(self.values))

    @property
    def failed(self) -> Tensor:
        """(B,) bool: answers on which a function failed."""
        failed = torch.zeros(len(self.values), dtype=torch.bool)
        for function in self.functions:
            failed |= torch.tensor(function.failed, dtype=torch.bool)
        return failed

    def metrics(self) -> dict[str, float]:
        """Mean, spread and share of None of each function; what failed, and the time taken."""
        metrics: dict[str, float] = {}
        for k, function in enumerate(self.functions):
            metrics |= named_metrics(function.label, self.values[:, k])
            if (mean := mean_of_tokens(function.tokens or ())) is not None:
                metrics[f"reward_per_token/{function.label}"] = mean
            metrics[f"reward_seconds/{function.label}"] = function.seconds
            for reason, count in function.failures.items():
                name = f"reward_failures/{reason}"
                metrics[name] = metrics.get(name, 0.0) + count
        metrics["reward_failed"] = float(self.failed.float().mean()) if len(self.values) else 0.0
        return metrics

    def failure(self) -> str:
        """What the functions failed on, or may have, in one line; "" if on nothing."""
        return "; ".join(filter(None, (f.describe() or f.advice for f in self.functions)))


def named_metrics(label: str, values: Tensor) -> dict[str, float]:
    """Mean, spread and share of None of one reward, (B,) with NaN for None."""
    known = values[~values.isnan()]
    metrics = {f"reward_none/{label}": 1 - len(known) / max(1, len(values))}
    if len(known):
        metrics[f"reward_mean/{label}"] = float(known.mean())
        metrics[f"reward_std/{label}"] = float(known.std(correction=0))
    return metrics


def rewards_of(
    given: GivenRewards | None,
    config: ScoringConfig,
    print_line: Callable[[str], None] | None = None,
    columns: Iterable[str] | None = None,
) -> RewardFunctions | None:
    """Reward functions ready to score; None for none.

    Args:
        columns: as `RewardFunctions` takes them.
    Raises:
        ConfigError: a name leads nowhere.
    """
    if isinstance(given, RewardFunctions):
        return given
    if given is None:
        return None
    functions = [given] if isinstance(given, str) or callable(given) else list(given)
    return RewardFunctions(functions, config, print_line, columns=columns) if functions else None


def function_scores(
    rewards: RewardFunctions,
    rollout: Rollout,
    renderer: Renderer | None = None,
    world: World | None = None,
) -> RewardColumns:
    """The functions' scores of a rollout's answers, computed by the first rank for all.

    Each function is called as f(prompts=, completions=, **columns): `prompts` the text of each
    conversation's last user turn, `completions` the answers without their stop token, one list per
    column that the data's rows have (None where a row lacks it), and where a function takes them
    `messages`, all turns before the answer as role and content dicts, `new_messages`, those since
    the data's prompt and the answer, `completion_ids` and `prompt_texts`.

    Args:
        renderer: the policy's, for `prompt_texts` and for calls of tools in answers.
    Raises:
        DataError: on every rank, what keeps the first from calling one of them.
        StoppedWaiting: on every rank, a signal came while the first waited for a server.
    """
    world = world or World()
    scored: list[FunctionScores] = []
    problem = ""
    stopped: tuple[int, str] | None = None
    if world.is_first:
        dtype = torch.get_default_dtype()
        try:
            scored = rewards.score(_answers(rollout, rewards, renderer))
        except (DataError, ConfigError) as error:
            if world.size == 1:
                raise
            problem = str(error)
        except StoppedWaiting as stop:
            stopped = (stop.number, stop.where)
        finally:
            torch.set_default_dtype(dtype)  # a function that runs in this process may change it
    scored, problem, stopped = world.all_gather_object((scored, problem, stopped))[0]
    if stopped:
        raise StoppedWaiting(*stopped)
    if problem:
        raise DataError(problem)
    rows = [[math.nan if s is None else s for s in function.scores] for function in scored]
    values = torch.tensor(rows, dtype=torch.float32).T.to(rollout.batch.token_ids.device)
    return RewardColumns(values, tuple(scored))


def columns_given(config: RunConfig, rows: StepRows) -> ColumnAccount:
    """What becomes of the columns of a run's prompts."""
    prompts = chain(rows.prompts, rows.heldout_prompts)
    return account_of((prompt.columns for prompt in prompts), config.scoring.answer_column)


def check_rewards(
    given: Sequence[str],
    config: RunConfig,
    rows: StepRows,
    world: World,
    print_line: Callable[[str], None],
    *,
    trains: bool = True,
) -> None:
    """The self-test of named reward functions, on the first rank for all.

    Args:
        print_line: shows what was found, and what becomes of the columns, on the first rank.
        trains: whether steps follow.
    Raises:
        ConfigError: on every rank, a function cannot tell a right answer from a wrong one.
    """
    if not given:
        return
    account = columns_given(config, rows)
    with refused_together(world):
        if world.is_first:
            for line in account.lines():
                print_line(line)
            if config.scoring.self_test:
                for line in _self_test(given, config, rows, account.names, print_line, trains):
                    print_line(line)


def _self_test(
    given: Sequence[str],
    config: RunConfig,
    rows: StepRows,
    columns: Sequence[str],
    print_line: Callable[[str], None],
    trains: bool,
) -> list[str]:
    """What it finds, in lines."""
    rewards = RewardFunctions(given, config.scoring, print_line, columns=columns)
    tested = [
        ReferenceRow(
            _prompt(row),
            as_dicts(row.messages),
            row.columns,
            str(row.source),
            partial(rows.renderer.prompt_text, row),
        )
        for row in rows.prompts
    ]
    needs_ids = rewards.need("completion_ids")
    encode = partial(_ids_of, rows.renderer, rows.tokenizer) if needs_ids else None
    try:
        return self_test(rewards, tested, encode, trains=trains)
    finally:
        rewards.close()


def _ids_of(renderer: Renderer, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*map(int, ids), renderer.terminator_id]


def _answers(rollout: Rollout, rewards: RewardFunctions, renderer: Renderer | None) -> Answers:
    ids = texts = None
    if rewards.need("completion_ids"):
        tokens = rollout.batch.on_host().token_ids
        ids = [tokens[row][own].tolist() for row, own in enumerate(answer_masks(rollout))]
    if renderer is not None and rewards.need("prompt_texts"):
        texts = [renderer.prompt_text(prompt) for prompt in rollout.prompts]
    return Answers(
        prompts=[_prompt(prompt) for prompt in rollout.prompts],
        completions=list(rollout.responses),
        messages=[as_dicts(prompt.messages) for prompt in rollout.prompts],
        rows=[prompt.columns for prompt in rollout.prompts],
        sources=[str(prompt.source) for prompt in rollout.prompts],
        completion_ids=ids,
        prompt_texts=texts,
        new_messages=new_messages(rollout, renderer),
    )


def _prompt(row: PromptRow) -> str:
    """The text of the last user turn: behind it may be calls of tools and what they returned."""
    users = [turn.content for turn in row.messages if turn.role == "user"]
    return users[-1] if users else row.messages[-1].content
