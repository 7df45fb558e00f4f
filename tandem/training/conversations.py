"""Rollouts of several turns: an environment of the user's answers the policy, which answers again.

A conversation goes on as soon as the environment has said something, beside the answers that are
still being drawn, and from the keys and values that its turns left in memory. Its tokens are those
that were sampled and heard: no answer is tokenized again. What it becomes follows from seeds and
turns alone, and not from times, ranks or which answer ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.config.conversations import conversation_tokens
from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import rl_stage
from tandem.data.render import Renderer
from tandem.data.turns import turns_in
from tandem.engine.hybrid import RLHFEngine
from tandem.errors import ConfigError, DataError, ModelError
from tandem.generation.conversing import ConversationRow, Conversing, End
from tandem.models.source import positions_in
from tandem.parallel.world import World
from tandem.rewards.calling import Outcome
from tandem.rewards.environment import Environment, Said
from tandem.text import one_line
from tandem.training.rollout_source import RolloutSource
from tandem.types import Message, PromptRow, Rollout

_LOOK_SECONDS = 0.2
"""A wait without end would miss a Ctrl-C that comes just before it begins."""


class ConversationSource:
    """A `RolloutSource`: conversations with an environment.

    Answers are drawn by one policy or another; all ranks call it and get the same rollout.
    """

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        *,
        max_answers: int,
        max_tokens: int,
        world: World | None = None,
        print_line: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            max_answers: of one conversation.
            max_tokens: of one, its data's prompt and its last answer counted; no answer begins
                that may exceed them.
        """
        self.environment = environment
        self._renderer, self._world = renderer, world or World()
        self._max_answers, self._max_tokens = max_answers, max_tokens
        self._print_line = print_line

    def describe(self) -> str:
        """In a line."""
        return (
            f"conversations of up to {self._max_answers} answers and {self._max_tokens:,} tokens "
            f"with {self.environment.label}"
        )

    def with_policy(self, engine: RLHFEngine) -> RolloutSource:
        """The source of an engine's answers.

        Raises:
            ConfigError: its conversations cannot go on.
        """
        if not engine.can_converse:
            raise ConfigError(
                "an environment must have a model that Tandem's own decoder runs, with "
                "hybrid_engine on and inference_tp_size 1; got another. Choose a model of a family "
                "in docs/models.md."
            )
        return _Collecting(self, engine)

    @contextmanager
    def talking(self, answer_tokens: int, positions: int | None) -> Iterator[Conversing]:
        """Within: what `generate` takes as `conversing`. Afterwards the environment's failures and
        what it printed are told.

        Args:
            answer_tokens: most of one answer. positions: of the policy.
        Raises:
            DataError: on every rank, the environment failed and `scoring.on_failure` is stop.
        """
        limit = self._max_tokens if positions is None else min(self._max_tokens, positions)
        with _Talk(self, limit - answer_tokens) as talk:
            yield talk
        environment = self.environment
        lines = environment.told(talk.failures, talk.num_asked)
        for line in lines:
            self._print_line(line)
        if environment.config.on_failure != "stop":
            return
        told = self._world.all_gather_object(lines[-1] if talk.failures else "")
        if problem := next(filter(None, told), ""):
            raise DataError(f"{problem}. Fix the function, or set scoring.on_failure to none.")

    def close(self) -> None:
        """End the environment's processes; they start again when they are needed."""
        self.environment.close()


@dataclass(frozen=True, slots=True)
class _Collecting:
    """Conversations of an engine's policy."""

    conversations: ConversationSource
    engine: RLHFEngine

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        """The conversations that these prompts begin."""
        engine = self.engine
        answer = engine.settings.sampling.max_new_tokens
        with self.conversations.talking(answer, positions_in(engine.actor.config)) as talk:
            return engine.rollout(prompts, step=step, numbers=numbers, conversing=talk)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A conversation that waits for the environment: what `Conversing.answered` heard."""

    place: int
    row: ConversationRow
    token_ids: tuple[int, ...]
    turns: tuple[Message, ...]


@dataclass(slots=True)
class _Talk:
    """One rollout's conversations with an environment, the `conversing` of `generate`. A context
    manager; leaving it ends what still answers.

    Attributes:
        longest: most tokens of the prompt of an answer. num_asked: answers that the environment was
            asked about. failures: where the rows came from that it failed on, and how.
    """

    conversations: ConversationSource
    longest: int
    num_asked: int = 0
    failures: list[tuple[str, Outcome]] = field(default_factory=list)
    _waiting: list[_Asked] = field(default_factory=list)
    _ready: list[tuple[int, ConversationRow]] = field(default_factory=list)
    _running: tuple[futures.Future[list[Outcome]], list[_Asked]] | None = None
    _thread: futures.ThreadPoolExecutor | None = None

    def __enter__(self) -> _Talk:
        if self.conversations.environment.waits_in_thread:
            self._thread = futures.ThreadPoolExecutor(1, "environment")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        self._thread.shutdown(wait=False, cancel_futures=True)
        if error is not None:
            self.conversations.close()  # else Ctrl-C would wait for deadlines
        self._thread.shutdown(wait=True)

    @property
    def max_answers(self) -> int:
        """Most answers of one conversation."""
        return self.conversations._max_answers

    def answered(
        self, place: int, row: ConversationRow, token_ids: Sequence[int], text: str
    ) -> None:
        """Ask the environment, at once or with the next ones if it is busy."""
        turns = (*row.messages, Message("assistant", text))
        self._waiting.append(_Asked(place, row, tuple(token_ids), turns))

    def going_on(self, *, wait: bool) -> Sequence[tuple[int, ConversationRow]]:
        """The conversations that it has answered by now."""
        while True:
            self._look()
            if self._ready or not wait or self._running is None:
                break
            futures.wait([self._running[0]], _LOOK_SECONDS)
        ready, self._ready = self._ready, []
        return ready

    def _look(self) -> None:
        """Note what has been answered, and ask about what waits."""
        if self._running is not None and self._running[0].done():
            future, asked = self._running
            self._running = None
            self._note(asked, future.result())
        if self._running is not None or not self._waiting:
            return
        asked, self._waiting = self._waiting, []
        self.num_asked += len(asked)
        said = [Said(as_dicts(one.turns), one.row.columns, str(one.row.source)) for one in asked]
        environment = self.conversations.environment
        if self._thread is None:
            self._note(asked, environment.replies(said))
        else:
            self._running = self._thread.submit(environment.replies, said), asked

    def _note(self, asked: Sequence[_Asked], outcomes: Sequence[Outcome]) -> None:
        for one, outcome in zip(asked, outcomes, strict=True):
            self._ready.append((one.place, self._next(one, outcome)))

    def _next(self, asked: _Asked, outcome: Outcome) -> ConversationRow:
        """The prompt of the next answer, or the row as it was with its end."""

        def ended(end: End) -> ConversationRow:
            return replace(asked.row, end=end)

        if outcome.failure:
            self.failures.append((str(asked.row.source), outcome))
            return ended("failed")
        if outcome.turns is None:
            return ended("over")
        row, renderer = asked.row, self.conversations._renderer
        turns = turns_in(outcome.turns)
        try:
            heard = renderer.heard(row.messages, turns, row.source, row.tools)
        except (DataError, ModelError) as error:
            failure = Outcome(None, "result", f"its turns cannot be rendered: {one_line(error)}")
            self.failures.append((str(row.source), failure))
            return ended("failed")
        is_closed = asked.token_ids[-1:] == (renderer.terminator_id,)
        closing = () if is_closed else (renderer.terminator_id,)  # a stop string ended it
        token_ids = (*row.token_ids, *asked.token_ids, *closing, *heard)
        if len(token_ids) > self.longest:
            return ended("tokens")
        return replace(row, token_ids=token_ids, messages=(*asked.turns, *turns))


def conversation_source(
    config: RunConfig,
    renderer: Renderer,
    *,
    columns: Sequence[str] = (),
    world: World | None = None,
    print_line: Callable[[str], None] = print,
) -> ConversationSource | None:
    """The conversations that a run's RL section describes; None without an environment.

    Args:
        columns: of the data's rows.
    Raises:
        ConfigError: the environment's name leads nowhere.
    """
    rl, section = rl_section(config), rl_stage(config.stages).section
    if not rl.environment:
        return None
    knob = f"{section}.environment"
    return ConversationSource(
        Environment(rl.environment, config.scoring, columns=columns, knob=knob),
        renderer,
        max_answers=rl.max_turns,
        max_tokens=conversation_tokens(config),
        world=world,
        print_line=print_line,
    )


def conversation_metrics(rollout: Rollout) -> dict[str, float]:
    """How many answers conversations had, and how they ended; nothing for single answers."""
    rows = [row for row in rollout.prompts if isinstance(row, ConversationRow)]
    if not rows:
        return {}

    def share(*ends: End) -> float:
        return sum(row.end in ends for row in rows) / len(rows)

    return {
        "conversation_answers": sum(row.num_answers for row in rows) / len(rows),
        "conversations_over": share("over"),
        "conversations_cut": share("turns", "tokens"),
        "environment_failed": share("failed"),
    }


def new_turns(row: PromptRow, response: str) -> list[dict[str, Any]]:
    """The turns since the data's prompt, the answer the last."""
    return as_dicts([*row.messages[len(given_turns(row)) :], Message("assistant", response)])


def given_turns(row: PromptRow) -> tuple[Message, ...]:
    """The turns of the data's prompt."""
    return row.messages[: row.given] if isinstance(row, ConversationRow) else row.messages


def said(row: PromptRow, response: str) -> str:
    """An answer; in a conversation all answers, with what each heard in brackets."""
    turns = new_turns(row, response)
    return " ".join(
        turn["content"] if turn["role"] == "assistant" else f"[{turn['content']}]" for turn in turns
    )


def as_dicts(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns as data has them."""
    return [turn.as_dict() for turn in turns]
