"""OpenAI's routes over a service: models, chat completions, completions; tokens, health, counts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tandem.errors import DataError
from tandem.process import resident_bytes
from tandem.serve import fields, unsupported
from tandem.serve.answering import Answering
from tandem.serve.api_errors import ApiError, json_response
from tandem.serve.bodies import (
    Wanted,
    read_chat,
    read_completion,
    read_continues,
    read_extras,
)
from tandem.serve.connection import ClientGoneError, EventStream, read_body, unless_gone
from tandem.serve.judging import Answered, Judging, finite, judge, sequence_logprobs
from tandem.serve.loading import Loaded
from tandem.serve.openapi import document
from tandem.serve.preparing import (
    Prepared,
    check_limits,
    no_tools,
    prepare_chat,
    prepare_text,
    refuse_long,
)
from tandem.serve.service import Service
from tandem.serve.shapes import ChatShape, CompletionShape, Shape
from tandem.serve.turns import read_messages, read_tools
from tandem.types import Message

Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All routes, each also without the version: some clients are told a base URL without."""
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._complete,
            "/v1/score": self._score,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets: dict[str, Handler] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        described = posts.keys() | gets.keys()
        handlers = [("POST", path, self._posted(path, run)) for path, run in posts.items()]
        handlers += [("GET", path, run) for path, run in gets.items()]
        return [
            Route(place, handler, methods=[method], include_in_schema=place in described)
            for method, path, handler in handlers
            for place in dict.fromkeys((path, path.removeprefix("/v1")))
        ]

    def _posted(
        self, path: str, run: Callable[[Request, dict[str, Any]], Awaitable[Response]]
    ) -> Handler:
        async def handle(request: Request) -> Response:
            service = self._service
            service.counters.add("requests_total", "Requests that were begun.", path=path)
            try:
                body = await read_body(request, service.settings.max_body_bytes)
                return await run(request, body)
            except ClientGoneError:
                self._count_gone()
                return Response(status_code=499)

        return handle

    async def _chat(self, request: Request, body: dict[str, Any]) -> Response:
        messages, tools, wanted = read_chat(body)
        self._service.source_of(wanted.model)
        with ExitStack() as stack:
            stack.enter_context(self._service.room(wanted.n))
            loaded = await self._service.policy(wanted.model)
            work = prepare_chat(
                self._service,
                loaded,
                messages,
                tools,
                continues=wanted.continues,
                wish=wanted.wish,
                variables=wanted.variables,
                prediction=wanted.prediction,
                most=self._service.engine.context_of(loaded),
                answers=wanted.n,
            )
            prompts = [await unless_gone(request.receive, work)]
            answering = self._answering(loaded, prompts, wanted, "messages", is_chat=True)
            shape = ChatShape(loaded.source.name, loaded.token_bytes, answering)
            return await self._answered(request, answering, shape, stack)

    async def _complete(self, request: Request, body: dict[str, Any]) -> Response:
        texts, wanted = read_completion(body)
        self._service.source_of(wanted.model)
        with ExitStack() as stack:
            answers = wanted.n * len(texts)
            stack.enter_context(self._service.room(answers))
            loaded = await self._service.policy(wanted.model)
            most, wish = self._service.engine.context_of(loaded), wanted.wish

            async def prepared() -> list[Prepared]:
                service = self._service
                how: dict[str, Any] = {"most": most, "answers": answers}
                return [await prepare_text(service, loaded, text, wish, **how) for text in texts]

            prompts = await unless_gone(request.receive, prepared())
            answering = self._answering(loaded, prompts, wanted, "prompt", is_chat=False)
            shape = CompletionShape(loaded.source.name, loaded.token_bytes, answering)
            return await self._answered(request, answering, shape, stack)

    def _answering(
        self, loaded: Loaded, prompts: list[Prepared], wanted: Wanted, name: str, *, is_chat: bool
    ) -> Answering:
        budgets = check_limits(self._service, loaded, prompts, wanted, name)
        about = "Tokens of prompts."
        self._service.counters.add(
            "prompt_tokens_total", about, sum(len(prompt.token_ids) for prompt in prompts)
        )
        return Answering(self._service, loaded, prompts, budgets, wanted, is_chat=is_chat)

    async def _answered(
        self, request: Request, answering: Answering, shape: Shape, stack: ExitStack
    ) -> Response:
        if not answering.wanted.stream:
            await unless_gone(request.receive, answering.finish())
            return json_response(shape.whole(answering))
        kept = stack.pop_all()  # the stream holds its place until it ends

        async def release() -> None:
            kept.close()

        return EventStream(_chunks(answering, shape), release, self._count_gone)

    def _count_gone(self) -> None:
        about = "Clients that left before the end of their answer."
        self._service.counters.add("gone_total", about)

    async def _score(self, request: Request, body: dict[str, Any]) -> Response:
        names = (*unsupported.TEMPLATE, "chat_template_kwargs")
        unsupported.refuse(body, names, unsupported.OF_SCORE, {})
        messages = read_messages(body.get("messages"))
        if messages[-1].role != "assistant" or len(messages) < 2:
            raise ApiError(
                "messages must end with the assistant's answer to score; got "
                f"{fields.shown(messages[-1].role)} last.",
                "messages",
            )
        tools = read_tools(body)
        wanted = read_extras(body.get("tandem", ["reward", "kl", "token_kl", "values"]))
        model = fields.text(body, "model", most=500)
        with self._service.room(1):
            loaded = await self._service.policy(model)
            work = self._scored(loaded, messages, tools, wanted - {"seed"})
            return json_response(await unless_gone(request.receive, work))

    async def _scored(
        self, loaded: Loaded, messages: list[Message], tools: str, wanted: frozenset[str]
    ) -> dict[str, Any]:
        service, asked, last = self._service, messages[:-1], messages[-1]
        answer = last if last.tool_calls else last.content
        context = service.engine.context_of(loaded)

        def render() -> tuple[Any, int]:
            """In a thread: templates may take long."""
            from tandem.data.render import IN_MEMORY

            try:
                refuse_long(loaded.renderer, messages, tools, context)
                row = loaded.renderer.conversation(asked, answer, IN_MEMORY, True, tools)
                if tools and loaded.renderer.hides_tools(asked):
                    raise no_tools()
            except DataError as error:
                raise ApiError(str(error), "messages") from None
            return row, row.response_mask.index(True)

        row, prompt = await service.in_text_thread(render)
        if len(row) > context:
            raise ApiError(
                f"this model's maximum context length is {context} tokens; got {len(row)} tokens "
                "of messages. Shorten them.",
                "messages",
                code="context_length_exceeded",
            )
        judges = await service.judges(loaded, wanted)
        answered = Answered(row.token_ids, prompt, True, tuple(asked), answer, tools)

        def work() -> tuple[list[Any], dict[str, Any]]:
            """In a thread."""
            logprobs = sequence_logprobs(loaded, [answered.row], 0)[0]
            return logprobs, judge([Judging(loaded, answered, wanted, judges, logprobs)])[0]

        logprobs, found = await service.in_engine(work)
        return {
            "object": "score",
            "model": loaded.source.name,
            "tokens": [loaded.token_bytes.text(each.token_id) for each in logprobs],
            "token_logprobs": finite([each.logprob for each in logprobs]),
            "tandem": finite(found),
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": len(logprobs),
                "total_tokens": len(row),
            },
        }

    async def _tokenize(self, request: Request, body: dict[str, Any]) -> Response:
        read, neutral = unsupported.OF_TOKENIZE, unsupported.NEUTRAL_TOKENIZE
        unsupported.refuse(body, unsupported.TEMPLATE, read, neutral)
        loaded = await self._service.policy(fields.text(body, "model", most=500))
        if body.get("messages") is not None:
            messages, tools = read_messages(body["messages"]), read_tools(body)
            continues = read_continues(body, messages)
            given = fields.variables(body)
            work = prepare_chat(
                self._service, loaded, messages, tools, continues=continues, variables=given
            )
            ids = (await work).token_ids
        else:
            field = "prompt" if "prompt" in body else "content"
            text = body.get(field)
            if not isinstance(text, str):
                raise fields.wrong(field, "be a text (or give messages)", text)
            ids = (await prepare_text(self._service, loaded, text)).token_ids
            if not fields.boolean(body, "add_special_tokens", default=True):
                ids = ids[len(loaded.encode("")) :]
        return json_response(
            {"tokens": list(ids), "count": len(ids),
             "max_model_len": self._service.engine.context_of(loaded)}
        )  # fmt: skip

    async def _detokenize(self, request: Request, body: dict[str, Any]) -> Response:
        loaded = await self._service.policy(fields.text(body, "model", most=500))
        tokens = body.get("tokens")
        is_ids = isinstance(tokens, list) and all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < loaded.vocabulary
            for i in tokens
        )
        if not is_ids:
            rule = f"be a list of token ids from 0 to {loaded.vocabulary - 1}"
            raise fields.wrong("tokens", rule, tokens)
        text = await self._service.in_text_thread(
            lambda: loaded.decode(tokens or []), is_bounded=False
        )
        return json_response({"prompt": text, "content": text})

    async def _models(self, request: Request) -> Response:
        if self._service.settings.follow:
            self._service.look_again()
        offer = self._service.offer
        data = [self._entry(name) for name in offer.models]
        scorer = offer.reward_model
        if scorer is not None and scorer.name not in offer.models:
            data.append(self._entry(scorer.name))
        return json_response({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:  # /v1/models/
            return await self._models(request)
        scorer = self._service.offer.reward_model
        if scorer is None or name != scorer.name:
            name = self._service.source_of(name).name
        return json_response(self._entry(name))

    def _entry(self, name: str) -> dict[str, Any]:
        offer = self._service.offer
        source = offer.models.get(name)
        facts: dict[str, Any] = {"kind": "reward model"}
        if source is not None:
            facts = {
                "kind": "policy",
                "stage": source.stage or None,
                "reference": source.reference or None,
                "finished": source.checkpoints is None,
                "preferred": name == offer.preferred,
                "reward": offer.reward_model is not None,
                "values": offer.critic is not None,
                "defaults": {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "max_tokens": min(
                        self._service.settings.max_new_tokens, self._service.context_of(source) - 1
                    ),
                },
            }
        created = int(self._service.started)
        return {"id": name, "object": "model", "created": created, "owned_by": "tandem",
                "tandem": facts}  # fmt: skip

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _openapi(self, request: Request) -> Response:
        return json_response(document(self._service.offer.models))

    async def _metrics(self, request: Request) -> Response:
        service = self._service
        blocks: dict[str, float] = dict(service.engine.free_blocks())
        prefixes = service.engine.prefix_tokens()
        gauges: dict[str, tuple[str, Mapping[str, float]]] = {
            "answers_outstanding": (
                "Answers that run or wait.",
                {"": service.outstanding + service.forming},
            ),
            "answers_in_engine": ("Answers the engine holds.", {"": service.engine.num_running}),
            "slots": ("Most answers of a model side by side.", {"": service.settings.slots}),
            "kv_blocks_free": ("Free blocks of KV memory, 16 tokens each.", blocks),
            "prompt_tokens_run": (
                "Tokens of prompts that were computed since the model's first answer.",
                {name: total - shared for name, (total, shared) in prefixes.items()},
            ),
            "prompt_tokens_shared": (
                "Tokens of prompts that earlier prompts and answers had computed.",
                {name: shared for name, (_, shared) in prefixes.items()},
            ),
            "resident_bytes": ("Memory of the process.", {"": resident_bytes()}),
            "uptime_seconds": ("Since the start.", {"": time.time() - service.started}),
        }
        page = service.counters.page(gauges)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")


async def _chunks(answering: Answering, shape: Shape) -> AsyncIterator[dict[str, Any]]:
    for choice in answering.choices:
        if opening := shape.opening(choice):
            yield opening
    async with aclosing(answering.steps()) as steps:
        async for step in steps:
            if chunk := shape.chunk(step):
                yield chunk
    if answering.wanted.include_usage:
        yield shape.closing(answering.usage())
