"""Multi-turn chat in the terminal, streaming, with a run's model or any model folder."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from os.path import expanduser
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tandem.checkpoint.beside import verify_beside
from tandem.config.load import load_config
from tandem.config.schema import SamplingConfig
from tandem.config.spellings import listed
from tandem.data.chat.own_template import put_template, read_template, with_kept_template
from tandem.data.render import Renderer
from tandem.data.thinking import thoughts_behind
from tandem.data.thoughts import NO_THOUGHTS
from tandem.data.turns import turns_in
from tandem.errors import ConfigError, FullError, ModelError, TandemError
from tandem.generation.detokenizer import AnswerText
from tandem.generation.laying_out import lay_out_model
from tandem.generation.limits import max_positions
from tandem.generation.stops import Stops
from tandem.generation.streaming import Turns
from tandem.models.checkpoint_ref import model_folders
from tandem.models.eos import load_stop_ids
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.rewards.environment import Environment, Said
from tandem.rewards.tool_schema import offered_tools
from tandem.serve.chat_form import check_form
from tandem.serve.greedy import as_drawn
from tandem.serve.named_model import find_model, models_of, notes_of, notes_on_flags
from tandem.serve.place import Place, put, read_from
from tandem.text import is_unicode, visible, visible_lines
from tandem.types import Message

HELP = """\
/retry           another answer to the last message
/undo            remove the last message and its answer
/clear           start a new conversation
/system TEXT     set the system prompt (without TEXT: none)
/set NAME VALUE  temperature, top_p, top_k, max_new_tokens or seed
/save FILE       append the conversation as a row of training data (JSONL, `messages`)
/quit            quit (or Ctrl-D; Ctrl-C stops an answer)"""

_MOST_ANSWERS = 8
"""To one message: as `max_turns` in training, by default."""
_ROWS = (".jsonl", ".ndjson")
"""Endings of files that training reads row by row; one of .txt is plain text to it."""


@dataclass
class Conversation:
    """A model, its sampling, and the turns so far.

    tools: functions that the model may call. schemas: theirs, as its prompt has them.
    """

    model: PreTrainedModel
    renderer: Renderer
    sampling: SamplingConfig
    seed: int = 0
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    num_answers: int = 0
    tools: Environment | None = None
    schemas: str = ""

    def __post_init__(self) -> None:
        self._memory = Turns(self.model, Stops.of(self.renderer))
        self._problem = ""
        self._thoughts = NO_THOUGHTS

    @cached_property
    def goes_on(self) -> bool:
        """Whether the template takes more than one prompt and its answer."""
        return self.renderer.takes_more_turns

    def answer(self) -> Iterator[str]:
        """Stream an answer to the last turn, and keep it as the next turn, also if interrupted.

        Randomness depends on (seed, number of answers), so a repeated conversation gives the same
        answers.
        """
        prompt = self.renderer.prompt(self.messages(), tools=self.schemas)
        self._thoughts = thoughts_behind(self.renderer, prompt.token_ids)
        said = AnswerText(
            self.renderer.decode, self.sampling.stop_strings, self.sampling.min_new_tokens
        )
        self.num_answers += 1
        drawn, self._problem = 0, ""
        try:
            seed, sampling = self.seed + self.num_answers, as_drawn(self.sampling)
            stream = self._memory.stream
            for token in stream(prompt.token_ids, sampling, seed=seed, tools=self.schemas):
                drawn += 1
                if piece := said.push(token):
                    yield piece
            if piece := said.flush():
                yield piece
        finally:
            turn = Message("assistant", said.text)
            room = max_positions(self.model) or math.inf
            if said.ended or drawn < min(self.sampling.max_new_tokens, room - len(prompt)):
                # One that was cut off may end within a call.
                spoken = self.renderer.spoken(said.text, self.schemas, self.turns)
                turn, self._problem = spoken.turn, spoken.problem
            self.turns.append(turn)

    def spoken(self) -> Iterator[tuple[str, str]]:
        """As `answer`: what each piece adds to the thoughts, and what to the words."""
        text, told = "", ("", "")
        for piece, is_over in chain(zip(self.answer(), repeat(False)), [("", True)]):
            text += piece
            now = self._thoughts.so_far(text, is_over)
            yield now[0][len(told[0]) :], now[1][len(told[1]) :]
            told = now

    def heard(self) -> list[Message]:
        """What the last answer hears of the tools that it calls, kept as the next turns; nothing if
        it calls none."""
        if self.tools is None or not (self._problem or self.turns[-1].tool_calls):
            return []
        messages = [turn.as_dict() for turn in self.messages()]
        said = Said(messages, {}, "the chat", self.schemas, self._problem)
        turns = turns_in(self.tools.heard(said).turns or [])
        self.turns += turns
        return turns

    def messages(self) -> list[Message]:
        """The conversation so far, system prompt first."""
        return ([Message("system", self.system)] if self.system else []) + self.turns


def _loaded(source: str, place: Place, trust_remote_code: bool) -> PreTrainedModel:
    """The model, ready to answer."""
    dtype = place.dtype_of(source, trust_remote_code=trust_remote_code)
    start = read_from(source, place.weights)
    model = load_causal_lm(start, dtype=dtype, trust_remote_code=trust_remote_code)
    put(model, place.device, dtype, place.weights)
    lay_out_model(model)
    return model


def read_line(prompt: str) -> str:
    """As `input`; a line that nobody typed, of a pipe or a file, is written behind the prompt, so
    that what was answered can be told.

    Raises:
        EOFError: at the end of the input.
    """
    line = input(prompt)
    if not sys.stdin.isatty():
        print(visible(line), flush=True)
    return line


def chat(
    path: str,
    sampling: SamplingConfig,
    *,
    which: str = "",
    system: str = "",
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "",
    trust_remote_code: bool = False,
    tools: Sequence[str] = (),
    read: Callable[[str], str] = read_line,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
) -> int:
    """Talk until /quit or the end of input; returns the exit code.

    Args:
        path, which: see `find_model`.
        device, dtype, weights: see `Place.of`.
        tools: functions that the model may call, as `file.py:name`.
        read, write: the terminal, or a replacement in tests.
    """
    schemas = offered_tools(tools, "--tools")
    environment = Environment(None, tools=tools) if tools else None
    if environment is not None and (problem := environment.problem(())):
        raise ConfigError(f"{problem}.")
    source = find_model(path, which)
    for folder in model_folders(source):
        verify_beside(folder)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    if which == "base":
        run = with_kept_template(load_config(Path(path) / "config.yaml"), Path(path))
        put_template(tokenizer, read_template(run.dataset.own_template))
    model = _loaded(source, Place.of(device, dtype, weights), trust_remote_code)
    renderer = Renderer(tokenizer, load_stop_ids(source))
    check_form(sampling, renderer)
    if problem := _unusable(system):
        raise ModelError(f"--system must be UTF-8 text without NUL; got {problem}.")
    if schemas and (renderer.call_reader is None or renderer.hides_tools([Message("user", "Hi")])):
        raise ModelError(
            f"--tools must go with a model whose chat template shows tools and writes calls; got "
            f"{visible(source)}. Remove --tools."
        )
    talk = Conversation(model, renderer, sampling, seed, system, tools=environment, schemas=schemas)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` history and line editing)
    others = [name for name, place in models_of(path).items() if place != source]
    choice = f" (other models: --model {listed([*others, 'base'])})" if others else ""
    write(f"talking to {visible(source)}{choice}. /help lists the commands, /quit quits.\n")
    notes = [*([] if which else notes_of(path)), _note_on_turns(talk), _note_on_length(talk)]
    notes += [] if which == "base" else notes_on_flags(path, tools, sampling)
    for note in notes:
        write(note)
    while True:
        try:
            line = read("\nyou> ").strip()
        except EOFError:
            write("\n")
            return 0
        except KeyboardInterrupt:
            continue
        except UnicodeDecodeError:
            write("not UTF-8; type it again.\n")
            continue
        if problem := _unusable(line):
            write(f"a message must be UTF-8 text without NUL; got {problem}.\n")
            continue
        if line.split(" ", 1)[0] in ("/quit", "/exit"):
            return 0
        if line:
            _turn(talk, line, write)


def _unusable(text: str) -> str:
    """What in `text` files and tokenizers refuse; "" if nothing."""
    if not is_unicode(text):
        return "bytes that are not UTF-8"
    return "a NUL character" if "\0" in text else ""


def _turn(talk: Conversation, line: str, write: Callable[[str], None]) -> None:
    """One line from the user: a command or a message."""
    name, _, rest = line.partition(" ")
    if name == "/help":
        write(HELP + "\n")
    elif name == "/clear":
        talk.turns.clear()
        write("new conversation.\n")
    elif name == "/undo":
        write(_undo(talk))
    elif name == "/system":
        talk.system = rest.strip()
        write(f"system prompt: {visible(talk.system) or 'none'}\n")
    elif name == "/set":
        write(_set(talk, rest.split()))
    elif name == "/save":
        write(_save(talk, rest.strip()))
    elif name == "/retry":
        while talk.turns and talk.turns[-1].role != "user":
            talk.turns.pop()
        if talk.turns:
            _print_line(talk, write)
        else:
            write("there is no message to answer.\n")
    elif name.startswith("/"):
        write(f"{visible(name)} is not a command; /help lists them.\n")
    else:
        if not talk.goes_on:
            talk.turns.clear()
        talk.turns.append(Message("user", line))
        _print_line(talk, write)


def _undo(talk: Conversation) -> str:
    """Remove the last message and its answer, and say which."""
    if not talk.turns:
        return "there is nothing to undo.\n"
    while (removed := talk.turns.pop()).role != "user":
        pass
    line = removed.content.splitlines()[0]
    return f"removed: {visible(line if len(line) <= 60 else line[:60] + '…')}\n"


_ASSISTANT = "assistant> "


def _print_line(talk: Conversation, write: Callable[[str], None]) -> None:
    label = _ASSISTANT
    try:
        for _ in range(_MOST_ANSWERS):
            for thoughts, words in talk.spoken():
                if thoughts:
                    write(("thinking> " if label == _ASSISTANT else "") + visible_lines(thoughts))
                    label = f"\n{_ASSISTANT}"
                if words:
                    write(label + visible_lines(words))
                    label = ""
            write(f"{label}\n")
            label = _ASSISTANT
            heard = talk.heard()
            for line in talk.tools.printed() if talk.tools else ():
                write(f"{visible(line)}\n")
            for turn in heard:
                write(f"{turn.name or 'tool'}> {visible_lines(turn.content)}\n")
            if not heard:
                return
        write(f"[stopped after {_MOST_ANSWERS} answers]\n")
    except KeyboardInterrupt:
        is_kept = not talk.turns[-1].tool_calls  # which nothing would answer
        if not is_kept:
            _take_back(talk)
        write(f"{label} [stopped{'' if is_kept else '; the message is taken back'}]\n")
    except TandemError as error:  # only this message cannot be answered
        what = "the tools' results leave no room" if talk.turns[-1].role == "tool" else ""
        _take_back(talk)
        start = "" if label == _ASSISTANT else "\n"
        told = ": ".join(filter(None, ("not answered", what, visible(_advised(error, talk)))))
        write(f"{start}{told}\n")


def _advised(error: TandemError, talk: Conversation) -> str:
    """An error's text; where the conversation is full, with the commands that make room."""
    ways = {
        "/undo removes the last message and its answer, /clear all of them": talk.turns,
        "/system shortens the system prompt": talk.system,
    }
    known = ", ".join(way for way, helps in ways.items() if helps)
    is_full = isinstance(error, FullError) and known
    return f"{str(error).rstrip('.')}: {known}." if is_full else str(error)


def _take_back(talk: Conversation) -> None:
    """Remove the last message, and what was said to it."""
    while talk.turns and talk.turns.pop().role != "user":
        pass


def _note_on_turns(talk: Conversation) -> str:
    """A line if every message begins a conversation; "" if they make one."""
    if talk.goes_on:
        return ""
    return "note: the model's chat template takes one prompt: every message begins anew.\n"


def _note_on_length(talk: Conversation) -> str:
    """A line if answers as long as was asked for do not fit the model; "" if they do."""
    limit = max_positions(talk.model)
    asked = talk.sampling.max_new_tokens
    if limit is None or asked < limit:
        return ""
    return (
        f"note: the model has {limit} positions for the conversation and its answer, so answers "
        f"are cut before {asked} tokens.\n"
    )


def _set(talk: Conversation, words: Sequence[str]) -> str:
    kinds = {"temperature": float, "top_p": float, "top_k": int, "max_new_tokens": int}
    try:
        name, value = words
        if name == "seed":
            if not 0 <= int(value) < 2**63:
                raise ValueError
            talk.seed, talk.num_answers = int(value), 0
            return f"seed = {talk.seed}\n"
        number = kinds[name](value)
        low = {"max_new_tokens": 1, "top_p": 1e-6}.get(name, 0)
        if not low <= number < 2**31 or (name == "top_p" and number > 1):
            raise ValueError
    except (ValueError, KeyError):
        return "write e.g. /set temperature 0.7 (or top_p, top_k, max_new_tokens, seed)\n"
    talk.sampling = replace(talk.sampling, **{name: number})
    note = _note_on_length(talk) if name == "max_new_tokens" else ""
    return f"{name} = {number:g}\n{note}"


def _save(talk: Conversation, file: str) -> str:
    if not file.endswith(_ROWS):
        return "write e.g. /save good_chats.jsonl\n"
    if not talk.turns:  # a row that training refuses
        return "there is nothing to save.\n"
    row: dict[str, Any] = {"messages": [turn.as_dict() for turn in talk.messages()]}
    if talk.schemas:
        row["tools"] = json.loads(talk.schemas)
    try:
        with open(expanduser(file), "a", encoding="utf-8") as out:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError as error:
        return f"{visible(file)}: {error.strerror}\n"
    return f"saved {len(talk.turns)} turns to {visible(file)}\n"
