"""Rollouts of several turns: an environment of the user's answers the policy, which answers again.

A conversation goes on as soon as the environment has said something, beside the answers that are
still being drawn, and from the keys and values that its turns left in memory. Its tokens are those
that were sampled and heard: no answer is tokenized again. What it becomes follows from seeds and
turns alone, and not from times, ranks or which answer ends first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.conversations import conversation_tokens
from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import rl_stage
from tandem.data.render import Renderer
from tandem.data.turns import turns_in
from tandem.engine.hybrid import RLHFEngine
from tandem.errors import ConfigError, DataError, ModelError
from tandem.generation.conversing import ConversationRow, Conversing, End
from tandem.generation.limits import max_positions
from tandem.parallel.world import World
from tandem.rewards.calling import Outcome
from tandem.rewards.environment import Environment, Replies, Said, Tally
from tandem.rewards.pool import told_printed
from tandem.text import one_line
from tandem.training.rollout_source import RolloutSource
from tandem.types import Message, PromptRow, Rollout

_MOST_LETTERS = 100
"""Letters that a token may have: what has more for each token that there is room for, has none."""


class ConversationSource:
    """Conversations with an environment, of whichever policy answers (`with_policy`, `talking`)."""

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

    def describe(self, positions: int | None = None) -> str:
        """In a line. positions: of the policy."""
        return (
            f"conversations of up to {self._max_answers} answers and {self._limit(positions):,} "
            f"tokens with {self.environment.describe()}"
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
        longest = self._limit(positions) - answer_tokens
        environment, world = self.environment, self._world
        with Replies(environment) as replies:
            talk = _Talk(self._renderer, replies, max_answers=self._max_answers, longest=longest)
            yield talk
        ranks = world.all_gather_object((environment.printed(), talk.tally))
        lines = [line for printed, _ in ranks for line in printed]
        first, *others = [tally for _, tally in ranks]
        told = first.told(environment.label, others)
        for line in (*told_printed(environment.label, lines), *told):
            self._print_line(line)
        if environment.config.on_failure == "stop" and any(tally.ends for _, tally in ranks):
            raise DataError(f"{told[-1]}. Fix the function, or set scoring.on_failure to none.")

    def _limit(self, positions: int | None) -> int:
        """Most tokens of a conversation, as the model's positions allow."""
        return self._max_tokens if positions is None else min(self._max_tokens, positions)

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
        with self.conversations.talking(answer, max_positions(engine.actor)) as talk:
            return engine.rollout(prompts, step=step, numbers=numbers, conversing=talk)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A conversation that waits for the environment: what `Conversing.answered` heard."""

    place: int
    row: ConversationRow
    token_ids: tuple[int, ...]
    turns: tuple[Message, ...]
    num_calls: int


class _Talk:
    """One rollout's conversations with an environment, the `conversing` of `generate`.

    Attributes:
        max_answers: of one conversation. longest: most tokens of the prompt of an answer.
        tally: what became of the answers that the environment was asked about.
    """

    def __init__(
        self, renderer: Renderer, replies: Replies, *, max_answers: int, longest: int
    ) -> None:
        self.max_answers, self.longest = max_answers, longest
        self.tally = Tally()
        self._renderer, self._replies = renderer, replies
        self._asked: dict[int, _Asked] = {}

    def answered(
        self, place: int, row: ConversationRow, token_ids: Sequence[int], text: str
    ) -> None:
        """Ask the environment."""
        answer = self._renderer.spoken(text, row.tools, row.messages)
        turns = (*row.messages, answer.turn)
        said = Said(as_dicts(turns), row.columns, str(row.source), row.tools, answer.problem)
        calls = len(said.calls) + bool(said.problem) if self._replies.environment.tools else 0
        asked = _Asked(place, row, tuple(token_ids), turns, calls)
        self._asked[self._replies.ask(said)] = asked
        self.tally.num_asked += 1
        self.tally.num_calls += calls

    def going_on(self, *, wait: bool) -> Sequence[tuple[int, ConversationRow]]:
        """The conversations of which it has said something by now."""
        found = []
        for number, outcome in self._replies.came(wait=wait):
            asked = self._asked.pop(number)
            found.append((asked.place, self._next(asked, outcome)))
        return found

    def _next(self, asked: _Asked, outcome: Outcome) -> ConversationRow:
        """The prompt of the next answer, or the row as it was with its end."""
        row, renderer, source = asked.row, self._renderer, str(asked.row.source)

        def ended(end: End, failure: Outcome | None = None) -> ConversationRow:
            if failure is not None:
                self.tally.ends[asked.place] = source, failure.failure, failure.message
            return replace(row, end=end)

        if outcome.failure:
            return ended("failed", outcome)
        if outcome.turns is None:
            return ended("over")
        wrong = [turn for turn in outcome.turns if "failure" in turn]
        if asked.num_calls:
            calls, failed = row.calls + asked.num_calls, row.failed_calls + len(wrong)
            row = replace(row, calls=calls, failed_calls=failed)
        if wrong:
            self.tally.calls.setdefault(asked.place, []).extend(
                (source, turn["failure"], f"{turn.get('name', 'unreadable')}: {turn['error']}")
                for turn in wrong
            )
        letters = sum(len(turn["content"]) for turn in outcome.turns)
        if letters > _MOST_LETTERS * self.longest:  # to tokenize a megabyte would hold others up
            self.tally.no_room[asked.place] = source, f"{letters:,} letters"
            return ended("tokens")
        try:
            turns = turns_in(outcome.turns)
            heard = renderer.heard(row.messages, turns, row.source, row.tools)
        except (DataError, ModelError) as error:
            told = f"its turns cannot be rendered: {one_line(error)}"
            return ended("failed", Outcome(None, "result", told))
        is_closed = asked.token_ids[-1:] == (renderer.terminator_id,)
        closing = () if is_closed else (renderer.terminator_id,)  # a stop string ended it
        token_ids = (*row.token_ids, *asked.token_ids, *closing, *heard)
        if len(token_ids) > self.longest:
            before = len(token_ids) - len(heard)
            told = f"{len(heard):,} tokens behind {before:,}; prompts may have {self.longest:,}"
            self.tally.no_room[asked.place] = source, told
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
    """The conversations that a run's RL section describes; None without environment and tools.

    Args:
        columns: of the data's rows.
    Raises:
        ConfigError: a name leads nowhere.
    """
    rl = rl_section(config)
    if not rl.converses:
        return None
    return ConversationSource(
        environment_of(config, columns),
        renderer,
        max_answers=rl.max_turns,
        max_tokens=conversation_tokens(config),
        world=world,
        print_line=print_line,
    )


def own_conversations(
    engine: RLHFEngine, config: RunConfig, print_line: Callable[[str], None] | None = None
) -> RolloutSource | None:
    """The conversations of an engine's policy that its configuration asks for; None for single
    answers.

    Raises:
        ConfigError: a name leads nowhere, or the engine's conversations cannot go on.
    """
    talks = conversation_source(
        config, engine.renderer, world=engine.world, print_line=print_line or print
    )
    return None if talks is None else talks.with_policy(engine)


def environment_of(config: RunConfig, columns: Sequence[str]) -> Environment:
    """What answers the policy in a run's RL section, which says so.

    Args:
        columns: of the data's rows.
    Raises:
        ConfigError: a name leads nowhere.
    """
    rl, section = rl_section(config), rl_stage(config.stages).section
    return Environment(
        rl.environment, config.scoring, tools=rl.tools, columns=columns, section=section
    )


def conversation_metrics(rollout: Rollout) -> dict[str, float]:
    """How many answers conversations had, and how they ended; nothing for single answers."""
    rows = [row for row in rollout.prompts if isinstance(row, ConversationRow)]
    if not rows:
        return {}

    def share(*ends: End) -> float:
        return sum(row.end in ends for row in rows) / len(rows)

    found = {
        "conversation_answers": sum(row.num_answers for row in rows) / len(rows),
        "conversations_over": share("over"),
        "conversations_cut": share("turns", "tokens"),
        "environment_failed": share("failed"),
    }
    if any(row.tools for row in rows):
        calls = sum(row.calls for row in rows)
        found["tool_calls"] = calls / len(rows)
        found["tool_calls_failed"] = sum(row.failed_calls for row in rows) / max(1, calls)
    return found


def new_messages(
    rollout: Rollout, renderer: Renderer | None = None
) -> list[list[dict[str, Any]]] | None:
    """The turns of each row since its data's prompt, the answer the last; None where all are single
    answers without tools.

    Args:
        renderer: the policy's, which reads the calls of last answers.
    """
    if not any(isinstance(row, ConversationRow) or row.tools for row in rollout.prompts):
        return None
    found = []
    for row, response in zip(rollout.prompts, rollout.responses, strict=True):
        last = Message("assistant", response)
        if renderer is not None:
            last = renderer.spoken(response, row.tools, row.messages).turn
        found.append(as_dicts([*row.messages[len(given_turns(row)) :], last]))
    return found


def given_turns(row: PromptRow) -> tuple[Message, ...]:
    """The turns of the data's prompt."""
    return row.messages[: row.given] if isinstance(row, ConversationRow) else row.messages


def said(row: PromptRow, response: str) -> str:
    """An answer; in a conversation all answers, with what each heard in brackets."""
    turns = [*row.messages[len(given_turns(row)) :], Message("assistant", response)]
    return " ".join(
        _brief(turn) if turn.role == "assistant" else f"[{turn.content}]" for turn in turns
    )


def _brief(turn: Message) -> str:
    """An answer's words, then its calls as NAME(arguments)."""
    functions = [call["function"] for call in json.loads(turn.tool_calls or "[]")]
    calls = (
        f"{f['name']}({json.dumps(f['arguments'], ensure_ascii=False)[1:-1]})" for f in functions
    )
    return " ".join(filter(None, (turn.content, *calls)))


def as_dicts(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns as data has them."""
    return [turn.as_dict() for turn in turns]
