"""A run's environment, tried on made-up answers before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import rl_stage
from tandem.data.excerpt import excerpt
from tandem.data.render import Renderer
from tandem.data.turns import turns_in
from tandem.errors import ConfigError, DataError, ModelError
from tandem.parallel.world import World
from tandem.rewards.environment import Environment, Said
from tandem.text import counted
from tandem.training.conversations import as_dicts
from tandem.types import Message, PromptRow

_NUM_TRIED = 4
_MADE_UP = "I do not know."


def check_environment(
    config: RunConfig,
    prompts: Sequence[PromptRow],
    renderer: Renderer,
    columns: Sequence[str],
    world: World,
    print_line: Callable[[str], None],
) -> None:
    """Ask a run's environment, if it has one, what a made-up answer to some prompts hears, on the
    first rank for all.

    Args:
        columns: of the data's rows.
        print_line: shows what was found, on the first rank.
    Raises:
        ConfigError: on every rank, the function cannot be called or fails, or what it says cannot
            be rendered.
    """
    if not rl_section(config).environment:
        return
    problem = ""
    if world.is_first:
        try:
            print_line(_tried(config, prompts[:_NUM_TRIED], renderer, columns))
        except (ConfigError, DataError, ModelError) as error:
            problem = str(error)
    problem = world.all_gather_object(problem)[0]
    if problem:
        raise ConfigError(problem)


def _tried(
    config: RunConfig, prompts: Sequence[PromptRow], renderer: Renderer, columns: Sequence[str]
) -> str:
    """What the environment says to made-up answers, in a line."""
    name, knob = rl_section(config).environment, f"{rl_stage(config.stages).section}.environment"
    if not renderer.takes_more_turns:
        raise ConfigError(
            f"{knob} must have a chat template that takes another turn after an answer; got one "
            "that does not. Use another dataset.chat_template."
        )
    environment = Environment(name, config.scoring, columns=columns, knob=knob)
    if problem := environment.problem(columns):
        raise ConfigError(f"{problem}.")
    answered = [(*prompt.messages, Message("assistant", _MADE_UP)) for prompt in prompts]
    said = [
        Said(as_dicts(turns), prompt.columns, str(prompt.source))
        for turns, prompt in zip(answered, prompts, strict=True)
    ]
    try:
        outcomes = environment.replies(said)
    finally:
        environment.close()
    begin = f"environment {name}, asked what {_MADE_UP!r} hears as the answer to"
    heard = []
    for one, prompt, outcome in zip(said, prompts, outcomes, strict=True):
        if outcome.failure:
            raise ConfigError(
                f"{begin} {one.source}, must give turns or None; got: {outcome.message}. Fix the "
                "function: a policy may say anything."
            )
        if outcome.turns is not None:
            if problem := _unheard(renderer, prompt, turns_in(outcome.turns)):
                raise ConfigError(f"{begin} {one.source}, must give turns {problem}")
            heard.append(outcome.turns[-1]["content"])
    shown = f", e.g. {excerpt(heard[0])}" if heard else ""
    return f"{begin} {counted(len(prompts), 'prompt')}: goes on with {len(heard)}{shown}"


def _unheard(renderer: Renderer, prompt: PromptRow, turns: Sequence[Message]) -> str:
    """Why a policy would not hear these turns, as "that ...; got ..."; "" if it would."""
    expected = "that the chat template takes and shows; got"
    try:
        heard = renderer.heard(prompt.messages, turns, prompt.source, prompt.tools)
        for place, turn in enumerate(turns):
            other = [*turns[:place], replace(turn, content="Qz7other"), *turns[place + 1 :]]
            if renderer.heard(prompt.messages, other, prompt.source, prompt.tools) == heard:
                return (
                    f"{expected} a turn of role {turn.role}, of which it writes nothing. Use "
                    "another role, or another chat_template."
                )
    except (DataError, ModelError) as error:
        told = str(error).removeprefix(f"{prompt.source}: ")
        return f"{expected}: {told}"
    return ""
