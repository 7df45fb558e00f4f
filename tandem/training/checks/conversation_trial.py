"""A run's environment and tools, tried on made-up answers before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import rl_stage
from tandem.data.chat.call_probe import call_id
from tandem.data.excerpt import excerpt
from tandem.data.render import Renderer
from tandem.data.spoken import as_judged
from tandem.data.turns import turns_in
from tandem.errors import ConfigError, DataError, ModelError
from tandem.parallel.world import World
from tandem.rewards.environment import Environment, Said
from tandem.text import counted
from tandem.training.checks.agreement import refused_together
from tandem.training.conversations import as_dicts, environment_of
from tandem.types import Message, PromptRow

_NUM_TRIED = 4
_MADE_UP = "I do not know."
_NOBODYS = "no_such_tool"


class Readers(Protocol):
    """Prompts and who reads conversations: see `StepRows`."""

    @property
    def prompts(self) -> Sequence[PromptRow]:
        """To try."""

    @property
    def renderer(self) -> Renderer:
        """The policy's."""

    @property
    def judges(self) -> Sequence[Renderer]:
        """Of reward models with templates of their own."""


def check_environment(
    config: RunConfig,
    rows: Readers,
    columns: Sequence[str],
    world: World,
    print_line: Callable[[str], None],
) -> None:
    """Ask what answers a run's policy, if anything does, what a made-up answer to some prompts
    hears, on the first rank for all.

    Args:
        columns: of the data's rows.
        print_line: shows what was found, on the first rank.
    Raises:
        ConfigError: on every rank, a function cannot be called or fails, calls cannot be read in
            this model's answers, or what they hear cannot be rendered.
    """
    if not rl_section(config).converses:
        return
    with refused_together(world):
        if world.is_first:
            for line in _tried(config, rows, columns):
                print_line(line)


def _tried(config: RunConfig, rows: Readers, columns: Sequence[str]) -> list[str]:
    """What is said to made-up answers, in lines."""
    prompts, renderer = rows.prompts[:_NUM_TRIED], rows.renderer
    rl, section = rl_section(config), rl_stage(config.stages).section
    if not renderer.takes_more_turns:
        knob = f"{section}.{'tools' if rl.tools else 'environment'}"
        raise ConfigError(
            f"{knob} must have a chat template that takes another turn after an answer; got one "
            "that does not. Use another dataset.chat_template."
        )
    environment = environment_of(config, columns)
    if problem := environment.problem(columns):
        raise ConfigError(f"{problem}.")
    try:
        tried = _Trial(environment, prompts, renderer, rows.judges)
        lines = tried.tools(section) if rl.tools else []
        return lines + (tried.function() if rl.environment else [])
    finally:
        environment.close()


@dataclass(frozen=True, slots=True)
class _Trial:
    """What is asked about a few prompts."""

    environment: Environment
    prompts: Sequence[PromptRow]
    renderer: Renderer
    judges: Sequence[Renderer]

    def function(self) -> list[str]:
        """Ask the environment's function about an answer without calls."""
        environment, prompts, answer = (
            self.environment,
            self.prompts,
            Message("assistant", _MADE_UP),
        )
        said = [_said(prompt, answer) for prompt in prompts]
        outcomes = environment.replies(said)
        begin = f"{environment.label}, asked what {_MADE_UP!r} hears as the answer to"
        heard = []
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if outcome.failure:
                raise ConfigError(
                    f"{begin} {prompt.source}, must give turns or None; got: {outcome.message}. "
                    "Fix the function: a policy may say anything."
                )
            if outcome.turns is not None:
                if problem := self._unheard(prompt, answer, turns_in(outcome.turns)):
                    raise ConfigError(f"{begin} {prompt.source}, must give turns {problem}")
                heard.append(outcome.turns[-1]["content"])
        shown = f", e.g. {excerpt(heard[0])}" if heard else ""
        return [f"{begin} {counted(len(prompts), 'prompt')}: goes on with {len(heard)}{shown}"]

    def tools(self, section: str) -> list[str]:
        """Call a tool that there is not: what the user's own do with made-up arguments is not
        known."""
        advice = "Use a model made for tools, or dataset.chat_template chatml or default."
        environment, reader = self.environment, self.renderer.call_reader
        if reader is None:
            raise ConfigError(
                f"{section}.tools must have a chat template that writes calls of tools in a form "
                "that can be read back (a JSON object or list, a name and JSON, or tags for each "
                f"argument); got another. {advice}"
            )
        function = {"name": _NOBODYS, "arguments": {"text": "yes"}}
        call = {"id": call_id(0), "type": "function", "function": function}
        answer = Message("assistant", "", tool_calls=json.dumps([call]))
        for prompt in self.prompts:
            if self.renderer.hides_tools(prompt.messages):
                raise ConfigError(
                    f"{section}.tools must have a chat template that shows tools; got one that "
                    f"leaves them out of {prompt.source}. {advice}"
                )
            outcome = environment.replies([_said(prompt, answer)])[0]
            if outcome.failure or not outcome.turns:
                raise ConfigError(f"{environment.label} must answer calls; got: {outcome.message}")
            if problem := self._unheard(prompt, answer, turns_in(outcome.turns)):
                raise ConfigError(
                    f"{environment.label}, asked about a call in the answer to {prompt.source}, "
                    f"must give turns {problem}"
                )
        return [f"{environment.label}: a call is e.g. {excerpt(reader.example)}"]

    def _unheard(self, prompt: PromptRow, answer: Message, turns: Sequence[Message]) -> str:
        """Why a policy would not hear these turns, or a reward model not read them, as "that ...;
        got ..."; "" if all would."""
        expected = "that the chat template takes and shows; got"

        def heard(turns: Sequence[Message]) -> tuple[int, ...]:
            return self.renderer.heard(prompt.messages, turns, prompt.source, prompt.tools)

        try:
            found = heard(turns)
            for place, turn in enumerate(turns):
                other = replace(turn, content="Qz7other")
                if heard([*turns[:place], other, *turns[place + 1 :]]) == found:
                    return (
                        f"{expected} a turn of role {turn.role}, of which it writes nothing. Use "
                        "another role, or another chat_template."
                    )
            expected = "that the reward model's chat template takes; got"
            for judge in self.judges:
                conversation = (*prompt.messages, answer, *turns)
                as_judged(judge, conversation, _MADE_UP, prompt.source, prompt.tools)
        except (DataError, ModelError) as error:
            told = str(error).removeprefix(f"{prompt.source}: ")
            return f"{expected}: {told}"
        return ""


def _said(prompt: PromptRow, answer: Message) -> Said:
    turns = as_dicts((*prompt.messages, answer))
    return Said(turns, prompt.columns, str(prompt.source), prompt.tools)
