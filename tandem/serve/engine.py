"""One thread that owns the models: continuous batching of all requests, judging between steps.

Requests come in through a queue and results leave through a callback, so nobody else touches a
model. Answers enter and leave the batch between steps; what an answer says depends on its seed
alone. Finished answers wait a few steps to be judged together (`judging_queue`). A reader that is
slow or gone never holds the thread up.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakSet

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError, TandemError
from tandem.generation.blocks import affordable_blocks, blocks_for, free_bytes
from tandem.generation.constrained import Constraint
from tandem.generation.detokenizer import AnswerText
from tandem.generation.limits import rows_together
from tandem.generation.observed import TokenLogprobs
from tandem.generation.runner import kv_dtype
from tandem.generation.scheduler import state_slots
from tandem.generation.snapshots import spare_slots
from tandem.generation.stops import Stops
from tandem.generation.streaming import CHUNK_TOKENS, Conversations, Handle
from tandem.models.twin import decodes, kv_shapes
from tandem.serve.api_errors import ApiError
from tandem.serve.judging import Answered, Judges, Judging
from tandem.serve.judging_queue import JudgingQueue, Waiting
from tandem.serve.loading import Loaded
from tandem.types import Message

T = TypeVar("T")
_KV_SHARE = 0.3
"""Of the free memory, what one model's KV memory is measured from (`blocks.affordable_blocks` takes
half of it), so that several models fit."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step added to one answer.

    sample: its number in the generation. text: final text, without any part of a stop string.
    token_ids, logprobs: since the last event; the stop token is among the log-probs only.
    finish: "stop" or "length" at its end. stop_token: the token that ended it. judged: what was
    wanted of the answer, at its end. error: it failed.
    """

    sample: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str = ""
    stop_token: int | None = None
    judged: dict[str, Any] | None = None
    error: ApiError | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted of answers that have ended, and by which models. messages, tools: the
    prompt's, for a reward model with another tokenizer; begun: what it has of the answer."""

    wanted: frozenset[str]
    judges: Judges
    messages: tuple[Message, ...]
    tools: str = ""
    begun: str = ""


@dataclass(eq=False)
class Generation:
    """Answers to one prompt. top_logprobs: -1: none. stop_ids: end an answer, beside the model's,
    behind min_tokens; their text is none of its. decode: ids to text. deliver: takes the events
    of each step, on the engine's thread. asked: None: the answers are not judged. constraint: the
    form that they must have. predicted: ids of what they are likely to say."""

    loaded: Loaded
    prompt_ids: tuple[int, ...]
    sampling: SamplingConfig
    seed: int
    samples: int
    top_logprobs: int
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    min_tokens: int
    decode: Callable[[Sequence[int]], str]
    deliver: Callable[[list[Progress]], None]
    asked: Asked | None = None
    constraint: Constraint | None = None
    predicted: tuple[int, ...] = ()
    is_over: bool = False


@dataclass(eq=False)
class _Answer:
    generation: Generation
    sample: int
    text: AnswerText
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0


@dataclass(eq=False)
class _Running:
    """A model's answers in progress."""

    loaded: Loaded
    talk: Conversations
    answers: dict[Handle, _Answer] = field(default_factory=dict)


class Engine:
    """The thread. `start` and `cancel` may be called from any other."""

    def __init__(self, *, slots: int, max_context: int, prefill_tokens: int = CHUNK_TOKENS) -> None:
        """
        Args:
            slots: most answers of one model side by side.
            max_context: most tokens of prompt and answer, where the model allows as many.
            prefill_tokens: most tokens of prompts that run between two tokens of running answers.
        """
        self._prefill_tokens = prefill_tokens
        self.slots, self._max_context = slots, max_context
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[Loaded, _Running] = {}
        self._retired: WeakSet[Loaded] = WeakSet()  # until nobody has them: requests may start late
        # A pause is rarer here than for prompts, and a small model needs more tokens to be busy.
        self._finished = JudgingQueue(4 * prefill_tokens)
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._thread.start()

    def context_of(self, loaded: Loaded) -> int:
        """Most tokens of one prompt and its answer."""
        return min(self._max_context, loaded.positions or self._max_context)

    def start(self, generation: Generation) -> None:
        """Queue a generation; its events come through `deliver`."""
        self._commands.put(lambda: self._start(generation))

    def cancel(self, generation: Generation) -> None:
        """End a generation's answers and free their slots; harmless if it is over."""
        self._commands.put(lambda: self._cancel(generation))

    def compute(self, work: Callable[[], T]) -> Future[T]:
        """Run something between two steps, on the thread that owns the models."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def retire(self, loaded: Loaded) -> None:
        """Free what a model holds here, once its answers have ended, those too that start later."""
        self._commands.put(lambda: self._retired.add(loaded))

    def close(self) -> None:
        """Cancel everything and end the thread."""
        self._commands.put(None)
        self._thread.join()

    @property
    def num_running(self) -> int:
        """Answers that run, wait for a slot, or wait to be judged."""
        running = sum(len(running.answers) for running in list(self._running.values()))
        return running + len(self._finished)

    def free_blocks(self) -> dict[str, int]:
        """Free blocks of KV memory by model; the models that hold none are left out."""
        found = list(self._running.values())
        return {running.loaded.source.name: running.talk.num_free_blocks for running in found}

    def prefix_tokens(self) -> dict[str, tuple[int, int]]:
        """By model: tokens of the prompts so far, and how many of them were in memory already."""
        counts = {r.loaded.source.name: r.talk.prefix_counts for r in list(self._running.values())}
        return {name: (one.prompt_tokens, one.shared_tokens) for name, one in counts.items()}

    def _run(self) -> None:
        while True:
            if not self._take_commands(wait=not self._busy() and not self._finished):
                break
            for running in self._busy():
                self._step(running)
            self._finished.step(is_idle=not self._busy())
            self._free_retired()
        for running in self._running.values():
            running.talk.close()
        self._running.clear()

    def _busy(self) -> list[_Running]:
        return [running for running in self._running.values() if running.answers]

    def _take_commands(self, *, wait: bool) -> bool:
        """Run the commands that have come; False at the end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _start(self, generation: Generation) -> None:
        if generation.is_over:
            return
        try:
            running = self._running.get(generation.loaded) or self._open(generation.loaded)
            handles = running.talk.submit_samples(
                generation.prompt_ids,
                generation.sampling,
                seed=generation.seed,
                samples=generation.samples,
                top_logprobs=generation.top_logprobs,
                constraint=generation.constraint,
                predicted=generation.predicted,
            )
        except Exception as error:  # this request fails, and the others go on
            generation.is_over = True
            failed = _failure(error)
            generation.deliver([Progress(i, error=failed) for i in range(generation.samples)])
            return
        for sample, handle in enumerate(handles):
            text = AnswerText(generation.decode, generation.stops, generation.min_tokens)
            running.answers[handle] = _Answer(generation, sample, text)

    def _open(self, loaded: Loaded) -> _Running:
        context = self.context_of(loaded)
        blocks, slots, spare = None, self.slots, None
        if decodes(loaded.model):
            device, longest = loaded.model.device, blocks_for(context)
            free = int(free_bytes(device) * _KV_SHARE)
            slots = rows_together(loaded.model, slots, free)
            spare = spare_slots(loaded.model, slots, keeps_answers=True, free=free)
            blocks = affordable_blocks(
                kv_shapes(loaded.model),
                needed=slots * longest,
                largest=longest,
                dtype=kv_dtype(loaded.model),
                device=device,
                free=free,
                slots=state_slots(slots, spare),
            )
        talk = Conversations(
            loaded.model,
            Stops.of(loaded.renderer),
            slots=slots,
            max_tokens=context,
            kv_blocks=blocks,
            spare=spare,
            chunk_tokens=self._prefill_tokens,
        )
        self._running[loaded] = _Running(loaded, talk)
        return self._running[loaded]

    def _cancel(self, generation: Generation) -> None:
        generation.is_over = True
        running = self._running.get(generation.loaded)
        if running is None:
            return
        for handle, answer in list(running.answers.items()):
            if answer.generation is generation:
                running.talk.cancel(handle)
                del running.answers[handle]

    def _step(self, running: _Running) -> None:
        events: dict[Generation, list[Progress]] = {}
        try:
            for handle, token_ids in running.talk.step():
                answer = running.answers.get(handle)
                if answer is not None:
                    progress = self._progress(running, handle, answer, token_ids)
                    events.setdefault(answer.generation, []).append(progress)
        except Exception as error:  # of memory, say: these answers fail, and the server lives on
            self._fail_all(running, error, events)
        for generation, progress_of_all in events.items():
            generation.deliver(progress_of_all)

    def _progress(
        self, running: _Running, handle: Handle, answer: _Answer, token_ids: Sequence[int]
    ) -> Progress:
        text, finish, taken = "", "", []
        of, drawn = answer.generation, len(answer.token_ids)
        for token in token_ids:
            taken.append(token)
            is_stop = token in of.stop_ids and drawn + len(taken) > of.min_tokens
            if not is_stop:
                text += answer.text.push(token)
            if is_stop or answer.text.ended:
                finish = "stop"
                break
        # A step may draw more than the answer has, and fail behind its end.
        stop = None if finish else handle.stop_token
        error = None if finish or handle.error is None else _failure(handle.error)
        if handle.ended and not finish:
            finish = "stop" if handle.finished else "length"
        if finish or error:
            if not answer.text.ended:
                text += answer.text.flush()
            running.talk.cancel(handle)
            del running.answers[handle]
        answer.token_ids += taken
        end = len(answer.token_ids) + (stop is not None)
        logprobs = tuple(handle.logprobs[answer.num_logprobs : end])
        answer.num_logprobs += len(logprobs)
        if finish and not error and of.asked is not None:
            self._finished.add(_waiting(answer, of.asked, handle, finish, stop))
            finish = ""  # it is told with what the judges found
        return Progress(answer.sample, text, tuple(taken), logprobs, finish, stop, None, error)

    def _fail_all(
        self, running: _Running, error: Exception, events: dict[Generation, list[Progress]]
    ) -> None:
        failed = _failure(error)
        for answer in running.answers.values():
            progress = Progress(answer.sample, error=failed)
            events.setdefault(answer.generation, []).append(progress)
        running.answers.clear()
        del self._running[running.loaded]
        running.talk.close()

    def _free_retired(self) -> None:
        for loaded, running in list(self._running.items()):
            if loaded in self._retired and not running.answers:
                del self._running[loaded]
                running.talk.close()


def _waiting(
    answer: _Answer, asked: Asked, handle: Handle, finish: str, stop: int | None
) -> Waiting:
    """An answer that has ended, by the token `stop` if that is not None, as the judges take it."""
    generation = answer.generation
    drawn = (*answer.token_ids, *(() if stop is None else (stop,)))
    said = asked.begun + answer.text.text
    answered = Answered(
        (*generation.prompt_ids, *drawn),
        len(generation.prompt_ids),
        stop is not None,
        asked.messages,
        generation.loaded.renderer.spoken(said, asked.tools, asked.messages).turn,
        asked.tools,
    )
    judging = Judging(
        generation.loaded, answered, asked.wanted, asked.judges, handle.logprobs[: len(drawn)]
    )

    def deliver(judged: dict[str, Any]) -> None:
        generation.deliver([Progress(answer.sample, finish=finish, stop_token=stop, judged=judged)])

    def fail(error: Exception) -> None:
        generation.deliver([Progress(answer.sample, error=_failure(error))])

    return Waiting(judging, lambda: not generation.is_over, deliver, fail)


def _failure(error: Exception) -> ApiError:
    """The error of a request that the engine could not finish."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationError):
        return ApiError(str(error), code="invalid_value")
    if isinstance(error, TandemError):
        return ApiError(str(error), status=500)
    traceback.print_exception(error)
    return ApiError(f"the server failed: {type(error).__name__}.", status=500)
