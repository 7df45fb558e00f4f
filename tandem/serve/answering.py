"""From a checked request to the events of its answers, and away again if the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tandem.data.spoken import spoken
from tandem.generation.observed import TokenLogprobs
from tandem.generation.speculative import confirmed
from tandem.serve.bodies import Wanted
from tandem.serve.engine import Asked, Generation, Progress
from tandem.serve.judging import Answered, Judging, finite, judge, prompt_logprobs
from tandem.serve.loading import Loaded
from tandem.serve.preparing import Prepared
from tandem.serve.service import Service
from tandem.types import Message


@dataclass(eq=False)
class Choice:
    """One answer as far as it has come.

    logprobs: of the tokens, the stop token too. turn: once it has ended, of a chat with tools, it
    as a turn with its calls.
    """

    index: int
    prompt: Prepared
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_token: int | None = None
    finish: str = ""
    extras: dict[str, Any] | None = None
    echoed: list[TokenLogprobs | None] = field(default_factory=list)
    turn: Message | None = None

    @property
    def drawn(self) -> tuple[int, ...]:
        """The tokens that were drawn, the stop token too."""
        stop = () if self.stop_token is None else (self.stop_token,)
        return (*self.token_ids, *stop)


@dataclass(frozen=True, slots=True)
class Step:
    """What is new of one choice: text, and log-probs from `first_logprob` on."""

    choice: Choice
    text: str
    first_logprob: int


class Answering:
    """The answers to a request's prompts.

    Attributes:
        choices: prompts x n, those of a prompt side by side.
    """

    def __init__(
        self,
        service: Service,
        loaded: Loaded,
        prompts: Sequence[Prepared],
        budgets: Sequence[int],
        wanted: Wanted,
        *,
        is_chat: bool,
    ) -> None:
        self.loaded, self.wanted = loaded, wanted
        self.prompts = prompts
        self._service, self._budgets = service, budgets
        renderer = prompts[0].renderer or loaded.renderer
        self._decode = renderer.decode if is_chat else renderer.continuation
        if wanted.continues:
            self._decode = partial(renderer.decode, begins=False)
        self.choices = [
            Choice(i * wanted.n + sample, prompt)
            for i, prompt in enumerate(prompts)
            for sample in range(wanted.n)
        ]

    def usage(self) -> dict[str, Any]:
        """OpenAI's three counts; a prompt counts once. Of a prediction, too, how many of its tokens
        the answers said and did not say."""
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        drawn = sum(len(choice.drawn) for choice in self.choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": drawn,
                  "total_tokens": prompt + drawn}  # fmt: skip
        if not self.wanted.prediction:
            return counts
        answers = [choice.drawn for choice in self.choices]
        said = confirmed(self.prompts[0].predicted, answers)  # a chat has one prompt
        of = sum(len(choice.prompt.predicted) for choice in self.choices)
        details = {"accepted_prediction_tokens": said, "rejected_prediction_tokens": of - said}
        return {**counts, "completion_tokens_details": details}

    async def steps(self) -> AsyncGenerator[Step]:
        """What is new, as it comes, until all choices have ended. Closing it frees their slots.

        Raises:
            ApiError: an answer failed; the others are given up.
        """
        begun, is_first = time.monotonic(), True
        if self.wanted.echo:
            await self._echo()
            for choice in self.choices:
                yield Step(choice, choice.prompt.text, 0)
        left = len(self.choices)
        try:
            async with aclosing(self._events()) as events:
                async for choice, progress in events:
                    if is_first:
                        is_first = False
                        self._observe_first(time.monotonic() - begun)
                    if progress.error is not None:
                        raise progress.error
                    first = len(choice.logprobs)
                    choice.text += progress.text
                    choice.token_ids += progress.token_ids
                    choice.logprobs += progress.logprobs
                    choice.stop_token = progress.stop_token
                    if progress.finish:
                        self._ended(choice, progress)
                        left -= 1
                    yield Step(choice, progress.text, first)
                    if not left:
                        return
        finally:  # an answer that is given up was computed, too
            self._count_tokens(choice for choice in self.choices if not choice.finish)

    async def finish(self) -> None:
        """Wait until all choices have ended.

        Raises:
            ApiError: an answer failed.
        """
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass

    async def _events(self) -> AsyncGenerator[tuple[Choice, Progress]]:
        mailbox, wanted = self._service.mailbox(), self.wanted
        inbox = _Inbox()
        generations: list[Generation] = []
        for number, (prompt, budget) in enumerate(zip(self.prompts, self._budgets, strict=True)):
            asked = await self._asked(prompt)
            if budget == 0:
                judged = None if asked is None else self._judged_empty(prompt, asked)
                for sample in range(wanted.n):
                    ended = Progress(sample, finish="length", judged=judged)
                    yield self.choices[number * wanted.n + sample], ended
                continue

            def deliver(progress: list[Progress], number: int = number) -> None:
                mailbox.post(partial(inbox.put, number, progress))

            sampling = replace(
                wanted.sampling,
                max_new_tokens=budget,
                min_new_tokens=budget if wanted.ignore_eos else wanted.min_tokens,
            )
            top = wanted.top_logprobs
            if wanted.extras & {"kl", "token_kl"}:
                top = max(top, 0)
            generations.append(
                Generation(
                    self.loaded, prompt.token_ids, sampling, wanted.seed, wanted.n, top,
                    wanted.stops, wanted.stop_ids, wanted.min_tokens, self._decode, deliver, asked,
                    prompt.constraint, prompt.predicted,
                )
            )  # fmt: skip
        try:
            for generation in generations:
                self._service.engine.start(generation)
            while generations:
                # One chunk for what came while another was written.
                for place, progress in _merged(await inbox.take(), wanted.n).items():
                    yield self.choices[place], progress
        finally:
            for generation in generations:
                self._service.engine.cancel(generation)

    async def _echo(self) -> None:
        """The prompts' own log-probs, where they are wanted."""
        if self.wanted.top_logprobs < 0:
            return
        for number, prompt in enumerate(self.prompts):
            work = partial(prompt_logprobs, self.loaded, prompt.token_ids, self.wanted.top_logprobs)
            echoed = await self._service.in_engine(work)
            for choice in self.choices[number * self.wanted.n : (number + 1) * self.wanted.n]:
                choice.echoed = echoed

    async def _asked(self, prompt: Prepared) -> Asked | None:
        """What the engine is to find out about the answers to a prompt."""
        wanted = self.wanted.extras - {"seed"}
        if not wanted:
            return None
        judges = await self._service.judges(self.loaded, wanted)
        return Asked(wanted, judges, prompt.messages, prompt.tools, prompt.begun)

    def _judged_empty(self, prompt: Prepared, asked: Asked) -> dict[str, Any]:
        """What is found of an answer without tokens; no model runs."""
        ids = prompt.token_ids
        answered = Answered(ids, len(ids), False, prompt.messages, "", prompt.tools)
        return judge([Judging(self.loaded, answered, asked.wanted, asked.judges)])[0]

    def _ended(self, choice: Choice, progress: Progress) -> None:
        counters, extras = self._service.counters, self.wanted.extras
        counters.add("answers_total", "Answers given.", finish=progress.finish)
        self._count_tokens([choice])
        choice.finish = progress.finish
        asked = choice.prompt
        if asked.tools:
            reader, is_cut = self.loaded.renderer.call_reader, choice.finish == "length"
            said = spoken(reader, choice.text, asked.tools, asked.messages, is_cut=is_cut)
            choice.turn = said.turn
        if extras:
            seed = {"seed": self.wanted.seed} if "seed" in extras else {}
            choice.extras = seed | finite(progress.judged or {})

    def _count_tokens(self, choices: Iterable[Choice]) -> None:
        drawn = sum(len(choice.drawn) for choice in choices)
        self._service.counters.add("completion_tokens_total", "Tokens drawn.", drawn)

    def _observe_first(self, seconds: float) -> None:
        about = "Time from a request to its first token."
        self._service.counters.observe("time_to_first_token_seconds", about, seconds)


class _Inbox:
    """What the engine has delivered to one request and nobody has read; of the loop's thread."""

    def __init__(self) -> None:
        self._came: list[tuple[int, list[Progress]]] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, number: int, progress: list[Progress]) -> None:
        """Progress of the prompt's answers."""
        self._came.append((number, progress))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[tuple[int, list[Progress]]]:
        """All that has come, once there is something; for one reader."""
        if not self._came:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        came, self._came = self._came, []
        return came


def _merged(came: Sequence[tuple[int, list[Progress]]], n: int) -> dict[int, Progress]:
    """Progress by choice: `came` lists prompts' numbers with that of their n samples, in order."""
    found: dict[int, Progress] = {}
    for number, progress_of_all in came:
        for new in progress_of_all:
            place = number * n + new.sample
            old = found.get(place)
            if old is not None:
                new = Progress(
                    new.sample,
                    old.text + new.text,
                    (*old.token_ids, *new.token_ids),
                    (*old.logprobs, *new.logprobs),
                    new.finish,
                    new.stop_token,
                    new.judged,
                    new.error,
                )
            found[place] = new
    return found
