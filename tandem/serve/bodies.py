"""The bodies of completion requests: every field read, checked or refused by name.

Fields that change nothing here (`user`, `metadata`) are ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.schema import SamplingConfig
from tandem.serve import fields, unsupported
from tandem.serve.api_errors import ApiError
from tandem.serve.forms import NO_WISH, Wish, read_choice, read_wish
from tandem.serve.greedy import as_drawn
from tandem.serve.turns import read_messages, read_prediction, read_tools
from tandem.types import Message

MOST_CHOICES = 128
MOST_STOP_IDS = 1000
_MOST_STOPS = 16
EXTRAS = ("reward", "kl", "token_kl", "values", "seed")
"""What a request may ask for in `tandem`."""
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants of every prompt.

    max_tokens: None: a default; 0 only with echo. n: answers per prompt. top_logprobs: -1: none.
    seed: of the draws. extras: see `EXTRAS`. continues: the answer goes on with the last turn.
    stop_ids: tokens that end answers, beside the model's. wish: its form. variables: of the chat
    template, that are set. prediction: what answers are likely to say.
    """

    model: str
    sampling: SamplingConfig
    max_tokens: int | None
    n: int
    seed: int
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    min_tokens: int
    ignore_eos: bool
    top_logprobs: int
    stream: bool
    include_usage: bool
    extras: frozenset[str]
    echo: bool = False
    continues: bool = False
    wish: Wish = NO_WISH
    variables: tuple[tuple[str, str], ...] = ()
    prediction: str = ""


def read_chat(body: Mapping[str, Any]) -> tuple[list[Message], str, Wanted]:
    """The turns, tools (a list as JSON text) and wishes of a chat completion.

    Raises:
        ApiError: a field is wrong, or not supported.
    """
    names = (*unsupported.BOTH, *unsupported.CHAT)
    unsupported.refuse(body, names, unsupported.OF_CHAT, unsupported.NEUTRAL_CHAT)
    unsupported.refuse_other_answers(body)
    turns = read_messages(body.get("messages"))
    listed = "" if body.get("tool_choice") == "none" else read_tools(body)
    top = fields.integer(body, "top_logprobs", 0, 0, 20) or 0
    if body.get("top_logprobs") is not None and not fields.boolean(body, "logprobs"):
        raise fields.wrong("top_logprobs", "come with logprobs: true", body["top_logprobs"])
    top = top if fields.boolean(body, "logprobs") else -1
    wish = read_choice(body, listed, read_wish(body))
    continues = read_continues(body, turns)
    wanted = _wanted(body, wish, top_logprobs=top, continues=continues)
    predicted = read_prediction(body.get("prediction"))
    return turns, listed, replace(wanted, variables=fields.variables(body), prediction=predicted)


def read_continues(body: Mapping[str, Any], turns: Sequence[Message]) -> bool:
    """Whether the answer is to go on with the last turn, the assistant's, as vLLM and transformers
    name it.

    Raises:
        ApiError: it cannot.
    """
    continues = fields.boolean(body, "continue_final_message")
    begins = fields.boolean(body, "add_generation_prompt", default=not continues)
    if not continues and not begins:
        raise unsupported.unsupported("add_generation_prompt", False)
    if not continues:
        return False
    last = turns[-1]
    advice = ""
    if begins:
        advice = "without add_generation_prompt true, which would begin an answer of its own"
    elif body.get("tools"):
        advice = "without tools, whose calls are read in whole answers"
    elif last.role != "assistant" or last.tool_calls:
        advice = "with a last turn that is the assistant's, without tool_calls"
    if advice:
        raise fields.wrong("continue_final_message", f"come {advice}", continues)
    return True


def read_completion(body: Mapping[str, Any]) -> tuple[list[Prompt], Wanted]:
    """The prompts and wishes of a completion.

    Raises:
        ApiError: a field is wrong, or not supported.
    """
    unsupported.refuse(body, (*unsupported.BOTH, "suffix"), unsupported.OF_COMPLETION)
    best_of = fields.integer(body, "best_of", None, 1, MOST_CHOICES)
    if best_of is not None and best_of != (fields.integer(body, "n", 1, 1, MOST_CHOICES) or 1):
        raise fields.wrong("best_of", "equal n: answers are not ranked", best_of)
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool):
        logprobs = 0 if logprobs else None
    top = fields.integer({"logprobs": logprobs}, "logprobs", -1, 0, 20)
    assert top is not None
    wanted = _wanted(body, read_wish(body), top_logprobs=top, echo=fields.boolean(body, "echo"))
    return read_prompts(body.get("prompt")), wanted


def read_prompts(value: Any) -> list[Prompt]:
    """A text, a list of texts, a list of token ids, or a list of such lists.

    Raises:
        ApiError: it is none of these, or empty.
    """
    name = "prompt"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fields.wrong(
            name, "be a text, token ids, or a list of either with at least one entry", value
        )
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [tuple(value)]
    if len(value) > MOST_CHOICES:
        raise ApiError(f"prompt must list at most {MOST_CHOICES} prompts; got {len(value)}.", name)
    prompts: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif (
            isinstance(item, list)
            and item
            and all(isinstance(i, int) and not isinstance(i, bool) for i in item)
        ):
            prompts.append(tuple(item))
        else:
            raise fields.wrong(name, "list texts or non-empty lists of token ids", item)
    return prompts


def _wanted(
    body: Mapping[str, Any],
    wish: Wish,
    *,
    top_logprobs: int,
    echo: bool = False,
    continues: bool = False,
) -> Wanted:
    stream = fields.boolean(body, "stream")
    max_tokens = _max_tokens(body, 0 if echo else 1)
    sampling, stops = _sampling(body), _stops(body)
    seed = fields.integer(body, "seed", None, -(2**63), 2**63 - 1)
    if sampling.top_k == 1:
        seed = seed or 0  # which of equal logits is drawn must not change
    return Wanted(
        model=fields.text(body, "model", most=500),
        sampling=sampling,
        max_tokens=max_tokens,
        n=fields.integer(body, "n", 1, 1, MOST_CHOICES) or 1,
        seed=secrets.randbits(53) if seed is None else seed,
        stops=stops,
        stop_ids=_stop_ids(body),
        min_tokens=fields.integer(body, "min_tokens", 0, 0, 2**31 - 1) or 0,
        ignore_eos=fields.boolean(body, "ignore_eos"),
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=_include_usage(body, stream),
        extras=read_extras(body.get("tandem")),
        echo=echo,
        continues=continues,
        wish=wish,
    )


def _max_tokens(body: Mapping[str, Any], low: int) -> int | None:
    found = [
        fields.integer(body, name, None, low, 2**31 - 1)
        for name in ("max_completion_tokens", "max_tokens")
    ]
    given = {value for value in found if value is not None}
    if len(given) > 1:
        raise fields.wrong("max_tokens", "equal max_completion_tokens where both are given",
                           body["max_tokens"])  # fmt: skip
    return given.pop() if given else None


def _sampling(body: Mapping[str, Any]) -> SamplingConfig:
    temperature = fields.number(body, "temperature", 1.0, 0.0, 100.0)
    top_p = fields.number(body, "top_p", 1.0, 0.0, 1.0)
    top_k = fields.integer(body, "top_k", 0, -1, 2**31 - 1) or 0
    penalty = fields.number(body, "repetition_penalty", 1.0, 0.01, 100.0)
    asked = SamplingConfig(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=min(0.999999, fields.number(body, "min_p", 0.0, 0.0, 1.0)),
        repetition_penalty=penalty,
        presence_penalty=fields.number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_biases(body.get("logit_bias")),
        samples_per_prompt=1,
    )
    return as_drawn(asked)


def _biases(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", "be an object of token ids and numbers", value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise fields.wrong("logit_bias", "name tokens by their ids", key)
        biases[int(key)] = fields.number({"logit_bias": bias}, "logit_bias", 0.0, -100.0, 100.0)
    return tuple(f"{token}:{bias}" for token, bias in sorted(biases.items()))


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value in (None, "") else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.wrong("stop", "be a text or a list of texts that are not empty", value)
    if len(stops) > _MOST_STOPS or any(len(stop) > 1000 for stop in stops):
        raise ApiError(
            f"stop must list at most {_MOST_STOPS} texts of at most 1000 characters; got "
            f"{len(stops)}, the longest of {max(map(len, stops))}.",
            "stop",
        )
    return tuple(stops)


def _stop_ids(body: Mapping[str, Any]) -> frozenset[int]:
    value = body.get("stop_token_ids")
    ids = [] if value is None else value
    is_ids = isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids)
    if not is_ids or len(ids) > MOST_STOP_IDS:
        raise fields.wrong("stop_token_ids", f"list at most {MOST_STOP_IDS} token ids", value)
    return frozenset(ids)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise fields.wrong("stream_options", "be an object", options)
    if not stream:
        raise fields.wrong("stream_options", "come with stream: true", options)
    return fields.boolean(options, "include_usage")


def read_extras(value: Any) -> frozenset[str]:
    """The names in `tandem`: {"reward": true, ...} or a list of names.

    Raises:
        ApiError: it is neither, or names what there is not.
    """
    if value is None:
        return frozenset()
    if isinstance(value, dict):
        names = [name for name in value if fields.boolean(value, name)]
    else:
        names = value
    known = isinstance(names, list) and all(isinstance(n, str) and n in EXTRAS for n in names)
    if not known or (isinstance(value, dict) and set(value) - set(EXTRAS)):
        raise fields.wrong(
            "tandem", f"be {{NAME: true}} or a list of names, of {', '.join(EXTRAS)}", value
        )
    return frozenset(names)
