"""The server's routes as an OpenAPI 3.1 document, from the limits that the readers of bodies use.

Fields that the document does not name are ignored, unless they look like a mistyped one, so no
object here is closed unless its reader refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from tandem.data.thoughts import FIELDS
from tandem.serve import bodies, forms, unsupported, votes
from tandem.serve.run_views import SORTS
from tandem.serve.schemas import (
    Json,
    flag,
    json_body,
    maybe,
    number,
    object_of,
    path_text,
    query,
    ref,
    whole_number,
)
from tandem.serve.turns import PARTS
from tandem.types import Role
from tandem.version import own_version

_INT_MOST = 2**31 - 1
_SEED_MOST = 2**63 - 1
_ERRORS = {
    400: "A field is wrong, or would change the answer and is not supported.",
    401: "An API key is needed.",
    403: "The Host or the Origin is not allowed.",
    404: "There is no such model, vote, run or stage.",
    405: "The address takes another method.",
    408: "The body took too long to arrive.",
    409: "Another vote has this id.",
    413: "The body is over the limit.",
    429: "As many answers run and wait as may.",
    500: "The server failed.",
    507: "The disk refuses a vote.",
}
_EVERYWHERE = (401, 403, 405, 413)


def document(models: Iterable[str]) -> Json:
    """The whole document of a server that offers these models."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": own_version(),
            "description": "OpenAI's API over the models of a run. Unknown fields are ignored; "
            "fields that would change the answer and are not supported are refused by name, and so "
            "are names that look like a mistyped field.",
        },
        "paths": {**_model_paths(), **_vote_paths(), **_run_paths(), **_plain_paths()},
        "components": {
            "schemas": {**_requests(list(models)), **_responses()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _model_paths() -> Json:
    def post(name: str, about: str, answer: str, *more: int, streams: bool = False) -> Json:
        content = {"application/json": {"schema": ref(answer)}}
        if streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        return {"post": _operation(name, about, {"content": content}, (400, 408, *more), name)}

    busy = (404, 429, 500)
    return {
        "/v1/models": {"get": _operation("models", "The models.", json_body("ModelList"), ())},
        "/v1/models/{model}": {
            "get": _operation("model", "One model.", json_body("Model"), (404,)),
            "parameters": [path_text("model")],
        },
        "/v1/chat/completions": post(
            "Chat", "Answers to a conversation.", "ChatCompletion", *busy, streams=True
        ),
        "/v1/completions": post(
            "Completion", "Continuations of texts or ids.", "TextCompletion", *busy, streams=True
        ),
        "/v1/score": post("Score", "Reward, KL and values of a conversation.", "Scored", *busy),
        "/tokenize": post("Tokenize", "Text or turns as token ids.", "Tokens", 404, 500),
        "/detokenize": post("Detokenize", "Token ids as text.", "Text", 404, 500),
    }


def _vote_paths() -> Json:
    limit = query("limit", {"type": "integer", "minimum": 0, "maximum": 9_999_999})
    kept = _operation("Vote", "Keep a preference.", json_body("Kept"), (400, 408, 409, 507), "Vote")
    kept["responses"]["201"] = {"description": "It is new and on the disk.", **json_body("Kept")}
    listed = _operation("votes", "The newest votes, and the agreement.", json_body("Votes"), (400,))
    return {
        "/v1/votes": {"post": kept, "get": {**listed, "parameters": [limit]}},
        "/v1/votes/{id}": {
            "delete": _operation("undo", "Take a vote back.", json_body("Undone"), (400, 404, 507)),
            "parameters": [path_text("id")],
        },
    }


def _run_paths() -> Json:
    count = {"type": "integer", "minimum": 0, "maximum": 10**11 - 1}
    stage = {**query("stage", {"type": "string"}), "required": True}
    numbers = {name: query(name, count) for name in ("step", "offset", "limit", "row")}
    sort = query("sort", {"enum": [sign + name for name in SORTS for sign in ("", "-")]})
    prompt = query("id", {"type": "string"})
    other = [query("other", {"type": "string"}), query("other_stage", {"type": "string"}),
             query("other_step", count)]  # fmt: skip
    text = query("filter", {"type": "string", "maxLength": 1000})
    views = {
        "": ("A run's commands and results.", []),
        "/metrics": ("A stage's metrics, or their points.",
                     [stage, query("names", {"type": "string"})]),
        "/alarms": ("A stage's alarms.", [{**stage, "required": False}]),
        "/frontier": ("Reward against KL.", [stage]),
        "/histograms": ("Distributions of a step's answers.", [stage, numbers["step"]]),
        "/rollouts": ("Recorded answers.", [stage, numbers["step"], text, sort, numbers["offset"],
                                            numbers["limit"]]),
        "/rollout": ("One answer, token by token.", [stage, numbers["step"], numbers["row"]]),
        "/prompts": ("Followed prompts.", [stage]),
        "/prompt": ("One prompt over training.", [stage, {**prompt, "required": True}]),
        "/compare": ("The same prompts twice.", [stage, numbers["step"], *other]),
        "/data": ("The ledger and some rows.", []),
    }  # fmt: skip
    paths: Json = {"/api/runs": {"get": _operation("runs", "All runs.", json_body("Object"), ())}}
    for path, (about, parameters) in views.items():
        name = f"run{path.replace('/', '_')}"
        paths[f"/api/runs/{{run}}{path}"] = {
            "get": {**_operation(name, about, json_body("Object"), (400, 404)),
                    "parameters": parameters},
            "parameters": [path_text("run")],
        }  # fmt: skip
    return paths


def _plain_paths() -> Json:
    metrics = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    return {
        "/health": {"get": _operation("health", "Whether it serves.", json_body("Object"), ())},
        "/metrics": {"get": _operation("metrics", "Counts, for Prometheus.", metrics, ())},
        "/openapi.json": {"get": _operation("openapi", "This.", json_body("Object"), ())},
    }


def _operation(
    name: str, about: str, answer: Json, errors: tuple[int, ...], body: str = ""
) -> Json:
    found: Json = {
        "operationId": name,
        "summary": about,
        "responses": {
            "200": {"description": "OK", **answer},
            **{str(status): _error(status) for status in sorted({*errors, *_EVERYWHERE})},
        },
    }
    if body:
        content = {"application/json": {"schema": ref(f"{body}Request")}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _error(status: int) -> Json:
    found: Json = {"description": _ERRORS[status], **json_body("Error")}
    if status == 429:
        seconds = {"schema": {"type": "integer", "minimum": 1}, "required": True}
        found["headers"] = {"Retry-After": seconds}
    return found


def _requests(models: list[str]) -> Json:
    text, message = {"type": "string"}, ref("Turn")
    turns = {"type": "array", "items": message, "minItems": 1}
    model = {"enum": [*models, "", None], "description": "Without a name: the preferred one."}
    both = {
        "model": model,
        "tandem": _extras(),
        **_sampling(),
        **_refused(unsupported.BOTH),
        **_neutral(),
        **forms.described(),
    }
    refused = _refused(unsupported.CHAT)
    goes_on = {"continue_final_message": flag(), "add_generation_prompt": flag(),
               "chat_template_kwargs": {"type": ["object", "null"]}}  # fmt: skip
    not_told = {**_refused(unsupported.TEMPLATE), **_neutral(unsupported.NEUTRAL_TOKENIZE)}
    kinds = {"function": "object", "name": "string", "type": "string"}
    tool = {"anyOf": [object_of({name: {"type": kind}}, name) for name, kind in kinds.items()]}
    tools = {"type": ["array", "null"], "items": tool}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    prompt = [text, {**ids, "minItems": 1},
              {"type": "array", "minItems": 1, "maxItems": bodies.MOST_CHOICES,
               "items": {"anyOf": [text, {**ids, "minItems": 1}]}}]  # fmt: skip
    prediction = object_of(
        {"type": {"const": "content"}, "content": _text_or_parts()}, "type", "content"
    )
    choices = maybe(whole_number(1, bodies.MOST_CHOICES))
    top = maybe(whole_number(0, 20))
    return {
        "ChatRequest": object_of(
            {**both, **refused, **goes_on, "messages": turns, "tools": tools, "logprobs": flag(),
             "top_logprobs": top, "max_tokens": maybe(whole_number(1, _INT_MOST)),
             "max_completion_tokens": maybe(whole_number(1, _INT_MOST)),
             "tool_choice": forms.described_choice(), "prediction": maybe(prediction)},
            "messages",
        ),
        "CompletionRequest": object_of(
            {**both, "prompt": {"anyOf": prompt}, "echo": flag(), "best_of": choices,
             "suffix": ref("NotSupported"), "max_tokens": maybe(whole_number(0, _INT_MOST)),
             "logprobs": {"anyOf": [flag(), top]}},
            "prompt",
        ),
        "ScoreRequest": object_of(
            {"messages": {**turns, "minItems": 2}, "tools": tools, "model": model,
             "tandem": _extras(),
             **_refused((*unsupported.TEMPLATE, "chat_template_kwargs"))},
            "messages",
        ),
        "TokenizeRequest": {
            "anyOf": [
                *(object_of({"model": model, name: text, "add_special_tokens": flag(), **not_told},
                            name) for name in ("prompt", "content")),
                object_of({"model": model, "messages": turns, "tools": tools, **goes_on,
                           **not_told},
                          "messages"),
            ]
        },
        "DetokenizeRequest": object_of({"model": model, "tokens": ids}, "tokens"),
        "VoteRequest": _vote(turns, tools),
        **_turn(text),
        "NotSupported": {"enum": [None, False, 0, "", [], {}],
                         "description": "Would change the answer: refused unless empty."},
    }  # fmt: skip


def _text_or_parts() -> Json:
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": ref("Part")}]}


def _turn(text: Json) -> Json:
    said = _text_or_parts()
    others = _refused(("function_call", "audio"))
    words = {"role": {"enum": [*get_args(Role), "developer"]}, "content": said,
             "tool_call_id": maybe(text), "name": maybe(text)}  # fmt: skip
    thoughts = {name: maybe(text) for name in FIELDS}
    calls = {"role": {"enum": ["assistant"]}, "content": maybe(said), **thoughts,
             "tool_calls": {"type": "array", "items": ref("Call"), "minItems": 1}}  # fmt: skip
    thinks = [object_of({**calls, name: {"type": "string", "pattern": "\\S"}, **others,
                         "tool_calls": maybe(calls["tool_calls"])}, "role", name)
              for name in thoughts]  # fmt: skip
    function = {"name": {"type": "string", "pattern": "\\S"},
                "arguments": {"type": ["object", "string"]}}  # fmt: skip
    part = {"type": {"enum": list(PARTS)}, "text": text}
    return {
        "Turn": {
            "anyOf": [
                object_of({**words, **_refused(("tool_calls",)), **others}, "role", "content"),
                object_of({**calls, **others}, "role", "tool_calls"),
                *thinks,
            ]
        },
        "Call": object_of({"id": text, "function": object_of(function, "name")}, "function"),
        "Part": {"anyOf": [text, object_of(part, "type", "text")]},
    }


def _vote(turns: Json, tools: Json) -> Json:
    numbers = {name: maybe({"type": "number"}) for name in ("seed", "reward", "kl", "tokens")}
    answer = {"text": {"type": "string"}, "model": maybe({"type": "string"}), **numbers}
    identity = {"type": "string", "minLength": 1, "maxLength": 100, "pattern": "^[A-Za-z0-9_.:-]+$"}
    return object_of(
        {"id": identity, "messages": turns, "tools": tools,
         "verdict": {"enum": list(votes.VERDICTS)},
         "answers": {"type": "array", "minItems": 1, "maxItems": votes.MOST_ANSWERS,
                     "items": object_of(answer, "text")},
         "winner": maybe(whole_number(0, votes.MOST_ANSWERS - 1)),
         "rewrite": maybe({"type": "string", "maxLength": 1_000_000}),
         "who": maybe({"type": "string", "maxLength": 200}),
         "seed": maybe(whole_number(-_SEED_MOST - 1, _SEED_MOST)), "blind": flag()},
        "id", "messages", "verdict", "answers",
    )  # fmt: skip


def _sampling() -> Json:
    stop = {"type": "string", "maxLength": 1000}
    listed = {**stop, "minLength": 1}
    bias = {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": maybe(number(-100, 100))}  # fmt: skip
    options = maybe(object_of({"include_usage": flag()}))
    return {
        "n": maybe(whole_number(1, bodies.MOST_CHOICES)),
        "stop": maybe({"anyOf": [stop, {"type": "array", "items": listed, "maxItems": 16}]}),
        "stop_token_ids": maybe(
            {"type": "array", "items": whole_number(0, 2**31 - 1), "maxItems": bodies.MOST_STOP_IDS}
        ),
        "seed": maybe(whole_number(-_SEED_MOST - 1, _SEED_MOST)),
        "temperature": maybe(number(0, 100)),
        "top_p": maybe(number(0, 1)),
        "top_k": maybe(whole_number(-1, _INT_MOST)),
        "min_p": maybe(number(0, 1)),
        "presence_penalty": maybe(number(-2, 2)),
        "frequency_penalty": maybe(number(-2, 2)),
        "repetition_penalty": maybe(number(0.01, 100)),
        "logit_bias": maybe(bias),
        "min_tokens": maybe(whole_number(0, _INT_MOST)),
        "ignore_eos": flag(),
        "stream": flag(),
        "stream_options": options,
    }


def _extras() -> Json:
    names = list(bodies.EXTRAS)
    wanted = {"type": "object", "properties": {name: flag() for name in names},
              "additionalProperties": False}  # fmt: skip
    listed = {"type": "array", "items": {"enum": names}}
    return maybe({"anyOf": [wanted, listed]})


def _responses() -> Json:
    text: Json = {"type": "string"}
    whole: Json = {"type": "integer"}
    maybe_number = {"type": ["number", "null"]}
    said = {"role": {"const": "assistant"}, "content": maybe(text), "refusal": {"type": "null"}}
    calls = {"type": "array", "items": ref("Call"), "minItems": 1}
    message = object_of({**said, "reasoning_content": text, "tool_calls": calls}, *said)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    predicted = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    details = object_of(dict.fromkeys(predicted, whole), *predicted)
    usage = object_of(
        {**dict.fromkeys(counts, whole), "completion_tokens_details": details}, *counts
    )

    def completion(kind: str, *finish: str, **choice: Json) -> Json:
        keys = {"index": whole, "finish_reason": {"enum": ["stop", "length", *finish]},
                "logprobs": {"type": ["object", "null"]}, **choice}  # fmt: skip
        made = {
            "id": text,
            "object": {"const": kind},
            "created": whole,
            "model": text,
            "choices": {"type": "array", "items": object_of(keys, *keys)},
            "usage": usage,
        }
        return object_of(made, *made)

    def whole_object(**keys: Json) -> Json:
        return object_of(keys, *keys)

    model = whole_object(id=text, object={"const": "model"}, created=whole, owned_by=text)
    error = whole_object(message=text, type=text, param={"type": ["string", "null"]}, code=text)
    objects = {"type": "array", "items": {"type": "object"}}
    return {
        "Object": {"type": "object"},
        "Error": whole_object(error=error),
        "Model": model,
        "ModelList": whole_object(
            object={"const": "list"}, data={"type": "array", "items": ref("Model")}
        ),
        "ChatCompletion": completion("chat.completion", "tool_calls", message=message),
        "TextCompletion": completion("text_completion", text=text),
        "Scored": whole_object(
            object={"const": "score"}, model=text, tokens={"type": "array", "items": text},
            token_logprobs={"type": "array", "items": maybe_number}, tandem={"type": "object"},
            usage=usage,
        ),
        "Tokens": whole_object(
            tokens={"type": "array", "items": whole}, count=whole, max_model_len=whole
        ),
        "Text": whole_object(prompt=text, content=text),
        "Kept": whole_object(object={"const": "vote"}, id=text, new={"type": "boolean"}),
        "Undone": whole_object(object={"const": "vote"}, id=text, undone={"const": True}),
        "Votes": whole_object(object={"const": "list"}, data=objects, votes=whole, rows=whole),
    }  # fmt: skip


def _refused(names: tuple[str, ...]) -> Json:
    return {name: ref("NotSupported") for name in names}


def _neutral(fields: Mapping[str, Sequence[float | bool]] = unsupported.NEUTRAL) -> Json:
    return {name: {"enum": [*values, None]} for name, values in fields.items()}
