"""Every reward function of a run on a batch of answers: scores in order, failures counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.config.scoring import ScoringConfig
from tandem.errors import DataError
from tandem.rewards.binding import IF_NAMED, NEW_MESSAGES, columns_problem, names_parameter
from tandem.rewards.calling import Call, Outcome, RewardFunction, outcomes_of
from tandem.rewards.columns import account_of, columns_of
from tandem.rewards.form import as_turns, is_conversational, reads_messages
from tandem.rewards.loading import load_reward_function
from tandem.rewards.per_token import check_per_token, is_per_token
from tandem.rewards.pool import (
    PoolLimits,
    WorkerPool,
    cannot_fork,
    lines_printed,
    told_printed,
)
from tandem.rewards.remote import RemoteReward
from tandem.rewards.spec import RewardSpec, parse_specs, with_labels

OVERDUE_SECONDS = 60.0
"""After which a line says that a reward function is still running; then after twice that again."""

GivenFunction = str | RewardFunction | tuple[str | RewardFunction, float]
"""A function's name or the function itself, and maybe its weight."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What is to be scored; lists with one entry per answer.

    messages: all turns before the answers, as role and content dicts. new_messages: the turns since
    the data's prompts, the answer last; None: the answer alone. rows: the data's columns.
    sources: where each row came from. completion_ids: the sampled tokens, EOS included.
    prompt_texts: the prompts as the model reads them, control tokens included. None: not known.
    """

    prompts: list[str]
    completions: list[str]
    messages: list[list[dict[str, str]]]
    rows: Sequence[Mapping[str, Any]]
    sources: list[str]
    completion_ids: list[list[int]] | None = None
    prompt_texts: list[str] | None = None
    new_messages: list[list[dict[str, str]]] | None = None

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """One function's scores of a batch of answers.

    label, weight: its name in metrics, and what its scores are multiplied by. scores: None where
    it said so or failed. failed: whether it failed on each. failures: how often, by reason. first:
    of the first such answer, its row and what went wrong. seconds: how long it took for all.
    advice: what to look at where it gave None for all and failed on none; "" if nothing is known.
    tokens: what it gave each token of the answers, whose sums are the scores; None of a function
        that does not reward tokens.
    """

    label: str
    weight: float
    scores: list[float | None]
    failed: list[bool]
    failures: dict[str, int] = field(default_factory=dict)
    first: str = ""
    seconds: float = 0.0
    advice: str = ""
    tokens: list[list[float] | None] | None = None

    @staticmethod
    def joined(parts: Sequence[FunctionScores]) -> FunctionScores:
        """One function's scores of several batches, as of one."""
        failures: Counter[str] = Counter()
        for part in parts:
            failures.update(part.failures)
        return FunctionScores(
            parts[0].label,
            parts[0].weight,
            [score for part in parts for score in part.scores],
            [failed for part in parts for failed in part.failed],
            dict(failures),
            next((part.first for part in parts if part.first), ""),
            sum(part.seconds for part in parts),
            parts[0].advice if all(part.advice for part in parts) else "",
            None
            if parts[0].tokens is None
            else [one for part in parts for one in part.tokens or ()],
        )

    @property
    def num_failed(self) -> int:
        """Answers that it failed on, whatever the reason."""
        return sum(self.failed)

    def describe(self, fate: str = "") -> str:
        """The failures in one line, with the answers' fate; "" if there are none."""
        if not self.failures:
            return ""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.failures.items())
        return (
            f"reward function {self.label} failed on {self.num_failed} of {len(self.scores)} "
            f"answers ({reasons}){fate}; the first: {self.first}"
        )


@dataclass(slots=True)
class _Function:
    """A function, its spec and, where it runs in processes of its own, those."""

    spec: RewardSpec
    call: RewardFunction
    pool: WorkerPool | None
    printed: list[str]

    @property
    def is_whole(self) -> bool:
        """Whether one call scores all answers."""
        return self.pool is None or bool(getattr(self.call, "whole_rollout", False))


class RewardFunctions:
    """The reward functions of a run, ready to score.

    A function that is named runs in worker processes that import it; one that is given itself, in
    processes forked from this one. A function with the attribute `in_process` runs here, without
    deadline and limits, on the whole batch at once.
    """

    def __init__(
        self,
        functions: Sequence[GivenFunction],
        config: ScoringConfig | None = None,
        print_line: Callable[[str], None] | None = None,
        *,
        columns: Iterable[str] | None = None,
    ) -> None:
        """
        Args:
            print_line: shows a line to the user.
            columns: those of all rows that are to come, so that a row without one gets None; the
                user knows what becomes of them. None: those that are seen, of which lines tell.
        Raises:
            ConfigError: a name leads nowhere.
        """
        self.config = config or ScoringConfig()
        self._print_line = print_line or partial(print, flush=True)
        self._held: dict[str, list[FunctionScores]] | None = None
        self._on_heldout = False
        self._columns = set(columns or ())
        self._tells_of_columns = columns is None
        self._functions = [self._made(spec, call) for spec, call in named(functions)]

    @property
    def specs(self) -> list[RewardSpec]:
        """What the functions are called and weigh."""
        return [function.spec for function in self._functions]

    @property
    def calls(self) -> list[RewardFunction]:
        """The functions themselves, in the order of `specs`."""
        return [function.call for function in self._functions]

    def need(self, name: str) -> bool:
        """Whether a function asks for `completion_ids` or `prompt_texts`."""
        return any(names_parameter(call, name) for call in self.calls)

    @property
    def scores_each(self) -> bool:
        """Whether every function scores each answer by itself, in processes of its own."""
        return not any(function.is_whole for function in self._functions)

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        for function in self._functions:
            if function.pool is not None:
                function.pool.close()

    @contextmanager
    def told_once(self) -> Iterator[None]:
        """Within: what the functions print and fail on is told at the end, as of one batch."""
        self._held = {}
        try:
            yield
        finally:
            held, self._held = self._held, None
            for function in self._functions:
                if parts := held.get(function.spec.label):
                    self._tell(function, FunctionScores.joined(parts))

    @contextmanager
    def on_heldout(self) -> Iterator[None]:
        """Within: a function with the attribute `training_only` is not called and scores
        nothing."""
        self._on_heldout = True
        try:
            yield
        finally:
            self._on_heldout = False

    def score(
        self, answers: Answers, only: str = "", *, tells: bool = True
    ) -> list[FunctionScores]:
        """Each function's scores of the answers; failures are told in a line per function.

        Args:
            only: the label of the one function to call; empty: all of them.
            tells: off leaves failures to `tell_failures`; what the functions print is shown.
        Raises:
            DataError: a function cannot take the columns; or it fails and `on_failure` is stop.
        """
        given = self._given(answers)
        return [
            self._scored(function, self._call(function, answers, given), answers.sources, tells)
            for function in self._functions
            if only in ("", function.spec.label)
        ]

    def _given(self, answers: Answers) -> dict[str, list[Any]]:
        """The data's columns as the functions get them: always the same ones."""
        if self._tells_of_columns:
            self._tells_of_columns = False
            for line in account_of(answers.rows, self.config.answer_column).lines():
                self._print_line(line)
        columns = columns_of(answers.rows, self.config.answer_column, self._columns)
        self._columns |= columns.keys()
        return columns

    def _call(
        self, function: _Function, answers: Answers, columns: Mapping[str, list[Any]]
    ) -> Call:
        values: dict[str, list[Any]] = {**columns, "messages": answers.messages}
        if is_conversational(function.call) or names_parameter(function.call, NEW_MESSAGES):
            values[NEW_MESSAGES] = answers.new_messages or as_turns(answers.completions)
        for name in IF_NAMED:
            known = values.get(name) or getattr(answers, name)
            if known is not None and names_parameter(function.call, name):
                values[name] = known
        if problem := columns_problem(function.call, values, function.spec.label):
            raise DataError(f"{problem}.")
        return Call(answers.prompts, answers.completions, values)

    def _made(self, spec: RewardSpec, call: RewardFunction) -> _Function:
        config = self.config
        check_per_token(call, spec.label, config.combine)
        printed: list[str] = []
        if isinstance(call, RemoteReward):
            call = call.told(spec.label, config.deadline_seconds, self._print_line)
        if getattr(call, "in_process", False):
            return _Function(spec, call, None, printed)
        if not spec.where and (why := cannot_fork()):
            self._print_line(
                f"reward function {spec.label} runs in the training process, without deadline and "
                f"limits: {why}. Name it as file.py:function to run it in processes of its own."
            )
            return _Function(spec, call, None, printed)
        target = text_of(spec) if spec.where else call
        return _Function(
            spec, call, WorkerPool(target, PoolLimits.of(config), printed.append), printed
        )

    def tell_failures(self, found: FunctionScores) -> None:
        """Show a line on what a function failed on, if it did.

        Raises:
            DataError: it did, and `on_failure` is stop.
        """
        if found.failures:
            self._require_no_failure(found)
            gets = "score 0" if self.config.on_failure == "zero" else "get no score"
            self._print_line(found.describe(f", which {gets} from it"))

    def _scored(
        self, function: _Function, call: Call, sources: Sequence[str], tells: bool
    ) -> FunctionScores:
        spec = function.spec
        start = time.monotonic()
        with _shown_while_it_runs(self._print_line, spec.label, len(call)):
            outcomes = self._outcomes(function, call)
        failures = Counter(outcome.failure for outcome in outcomes if outcome.failure)
        first = next((i for i, outcome in enumerate(outcomes) if outcome.failure), None)
        scores = [outcome.score for outcome in outcomes]
        if self.config.on_failure == "zero":
            scores = [0.0 if outcome.failure else outcome.score for outcome in outcomes]
        is_silent = not failures and all(outcome.score is None for outcome in outcomes)
        told = reads_messages(function.call) if is_silent else ""
        found = FunctionScores(
            label=spec.label,
            weight=spec.weight,
            scores=scores,
            failed=[bool(outcome.failure) for outcome in outcomes],
            failures={reason: failures[reason] for reason in sorted(failures)},
            first="" if first is None else f"{sources[first]}: {outcomes[first].message}",
            seconds=time.monotonic() - start,
            advice=f"reward function {spec.label}: {told}" if told else "",
            tokens=[o.tokens for o in outcomes] if is_per_token(function.call) else None,
        )
        if self._held is None:
            self._tell(function, found, tells)
        else:
            self._require_no_failure(found)
            self._held.setdefault(spec.label, []).append(found)
        return found

    def _outcomes(self, function: _Function, call: Call) -> list[Outcome]:
        if len(call) == 0:
            return []
        if self._on_heldout and getattr(function.call, "training_only", False):
            return [Outcome(None)] * len(call)
        if function.pool is None:
            remote = function.call if isinstance(function.call, RemoteReward) else None
            parts = call.batches(remote.batch_size) if remote else [call]
            return [o for part in parts for o in outcomes_of(function.call, part)]
        calls = [call] if function.is_whole else call.each()
        return [outcome for outcomes in function.pool.run(calls) for outcome in outcomes]

    def _tell(self, function: _Function, found: FunctionScores, tells: bool = True) -> None:
        for line in told_printed(f"reward function {found.label}", lines_printed(function.printed)):
            self._print_line(line)
        if tells:
            self.tell_failures(found)

    def _require_no_failure(self, found: FunctionScores) -> None:
        if found.failures and self.config.on_failure == "stop":
            raise DataError(
                f"{found.describe()}. Fix the function, or set scoring.on_failure to none or zero."
            )


def named(functions: Sequence[GivenFunction]) -> list[tuple[RewardSpec, RewardFunction]]:
    """Each function with its spec; `where` is empty for one that was given itself.

    Raises:
        ConfigError: a name leads nowhere.
    """
    texts = [f for f in functions if isinstance(f, str)]
    specs = parse_specs(texts) if len(texts) == len(functions) else []
    found = [(spec, load_reward_function(text_of(spec))) for spec in specs]
    if not specs:
        for given in functions:
            item, weight = given if isinstance(given, tuple) else (given, None)
            if isinstance(item, str):
                (spec, *_) = parse_specs([item])
                if weight is not None:
                    spec = RewardSpec(spec.where, spec.function, spec.options, weight)
                found.append((spec, load_reward_function(text_of(spec))))
            else:
                label = getattr(item, "__name__", type(item).__name__)
                found.append(
                    (RewardSpec("", label, weight=1.0 if weight is None else weight), item)
                )
    labelled = with_labels([spec for spec, _ in found])
    return [(spec, call) for spec, (_, call) in zip(labelled, found, strict=True)]


def text_of(spec: RewardSpec) -> str:
    """A spec's function and options as `parse_spec` reads them; its weight left out."""
    from urllib.parse import urlencode

    return f"{spec.name}?{urlencode(spec.options)}" if spec.options else spec.name


@contextmanager
def _shown_while_it_runs(
    print_line: Callable[[str], None], label: str, num_answers: int
) -> Iterator[None]:
    """Say so, ever more rarely, where a reward function takes long: it may wait for something."""
    done = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        pause = OVERDUE_SECONDS
        while not done.wait(pause):
            seconds = time.monotonic() - start
            print_line(
                f"reward function {label} has run for {seconds:.0f} s on {num_answers} answers and "
                "has not returned. Ctrl-C stops the run; the same command continues."
            )
            pause *= 2

    thread = threading.Thread(target=watch, name="reward function watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
