"""What the routes share: the models, the engine, the limits and the counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from tandem.config.form_trial import SlowFormError
from tandem.config.recorded import is_folder
from tandem.config.stages import STAGES
from tandem.errors import TandemError
from tandem.generation.streaming import CHUNK_TOKENS
from tandem.serve.api_errors import ApiError
from tandem.serve.counters import Counters
from tandem.serve.engine import Engine
from tandem.serve.fields import shown
from tandem.serve.judging import Judges
from tandem.serve.loading import (
    Loaded,
    LoadedScalar,
    LoadSettings,
    is_in_hub,
    load_policy,
    load_scorer,
    positions_of,
)
from tandem.serve.mailbox import Mailbox
from tandem.serve.place import Place
from tandem.serve.sources import ModelSource, Offer, offer_of

T = TypeVar("T")
_MOST_FORM_SECONDS = 30.0
"""Of a request that waits for others' forms. One takes some 50 ms, or 2 s if it is made to."""
_QUICK_FORM_SECONDS = 0.5
"""Of a form's trial; one that takes longer is tried again among such forms."""
_RETRY_SECONDS = 10.0
"""Before a newer version that could not be loaded is tried again: trying may take seconds."""
_ALIASES = {f"{s.name}-{p.folder}": p.label for s in STAGES for p in s.policies}
"""Further names: `ppo-ema` for what chat calls `ema`."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What `tandem serve` was told.

    path: a run's folder, a model's folder or a hub name. base: where a moved base is now.
    device, dtype, weights: see `Place.of`.
    slots: answers of one model side by side. max_queue: further answers that may wait.
    max_context: most tokens of prompt and answer. max_new_tokens: of an answer whose request does
    not say. prefill_tokens: most tokens of prompts that run between two tokens of running answers.
    max_body_bytes: of a request. follow: read new checkpoints between requests.
    allow_hosts, allow_origins: beside the server's own. votes: the file of votes; "": the run's.
    runs: the folder of runs that the page shows; "": the run alone.
    """

    path: str
    base: str = ""
    device: str = "cpu"
    dtype: str = "fp32"
    weights: str = ""
    trust_remote_code: bool = False
    slots: int = 32
    max_queue: int = 64
    max_context: int = 4096
    max_new_tokens: int = 512
    prefill_tokens: int = CHUNK_TOKENS
    max_body_bytes: int = 4 << 20
    follow: bool = False
    api_key: str = ""
    host: str = "127.0.0.1"
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    votes: str = ""
    runs: str = ""


@dataclass(eq=False)
class _Slot:
    """A model that is loaded, or being loaded. failed: the newer version that could not be, which
    is not tried again before `retry`, of `time.monotonic`."""

    failed: tuple[ModelSource, str] | None = None
    retry: float = 0.0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    loaded: Loaded | None = None
    scalar: LoadedScalar | None = None


class Service:
    """The models of one path, loaded when they are first asked for."""

    def __init__(self, settings: ServeSettings, load: LoadSettings) -> None:
        """
        Raises:
            ModelError: the path offers no model.
        """
        self.settings = settings
        self._is_in_hub = cache(is_in_hub)  # asked at the start, not at each look at the run
        self.offer: Offer = self._offered()
        config = self.offer.config
        place = load.place if config is None else load.place.for_run(config.dtype)
        self.load_settings = replace(load, place=place)
        self.engine = Engine(
            slots=settings.slots,
            max_context=settings.max_context,
            prefill_tokens=settings.prefill_tokens,
        )
        self.counters = Counters()
        self.started = time.time()
        self.outstanding = self.forming = 0
        self._slots: dict[str, _Slot] = {}
        self._mailbox: Mailbox | None = None
        self._loader = ThreadPoolExecutor(1, "tandem-load")
        self._text = ThreadPoolExecutor(1, "tandem-text")
        self._long_text = ThreadPoolExecutor(1, "tandem-text-long")
        self._forms = ThreadPoolExecutor(1, "tandem-forms")
        self._slow_forms = ThreadPoolExecutor(1, "tandem-forms-slow")

    def close(self) -> None:
        """End the threads; the models are freed with the service."""
        self.engine.close()
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._text.shutdown(wait=False, cancel_futures=True)
        self._long_text.shutdown(wait=False, cancel_futures=True)
        self._forms.shutdown(wait=False, cancel_futures=True)
        self._slow_forms.shutdown(wait=False, cancel_futures=True)

    def mailbox(self) -> Mailbox:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    @property
    def votes_file(self) -> Path | None:
        """Where votes go; None without a run and without a name for it."""
        if self.settings.votes:
            return Path(self.settings.votes).expanduser()
        return None if self.offer.run is None else self.offer.run / "votes.jsonl"

    def source_of(self, name: str) -> ModelSource:
        """The model of a request; without a name, the preferred one.

        Raises:
            ApiError: there is none of that name, or it only scores.
        """
        name = name or self.offer.preferred
        name = name if name in self.offer.models else _ALIASES.get(name, name)
        found = self.offer.models.get(name)
        if found is None and self.settings.follow:
            self.look_again()
            found = self.offer.models.get(name)
        if found is not None:
            return found
        scorer = self.offer.reward_model
        if scorer is not None and scorer.name == name:
            raise ApiError(
                f"model {shown(name)} is a reward model, which writes no text. Use POST /v1/score.",
                "model",
            )
        known = ", ".join(self.offer.models)
        raise ApiError(
            f"model must be one of {known}; got {shown(name)}.",
            "model",
            status=404,
            code="model_not_found",
        )

    def context_of(self, source: ModelSource) -> int:
        """Most tokens of one prompt and its answer. Of a model that is not loaded, by its config;
        --max-context where that cannot be read."""
        slot = self._slots.get(source.name)
        if slot is not None and slot.loaded is not None:
            return self.engine.context_of(slot.loaded)
        most = self.settings.max_context
        return min(most, positions_of(source, self.load_settings) or most)

    def look_again(self) -> None:
        """Read the run's folder again: stages may have begun or finished."""
        try:
            self.offer = self._offered()
        except TandemError:  # in the middle of a change; what was known still serves
            return

    def _offered(self) -> Offer:
        return offer_of(
            self.settings.path,
            base=self.settings.base,
            is_nowhere=lambda model: not (is_folder(model) or self._is_in_hub(model)),
        )

    async def policy(self, name: str) -> Loaded:
        """A policy, loaded; the newest version where the server follows a run.

        Raises:
            ApiError: there is none of that name, or it cannot be loaded.
        """
        if self.settings.follow:
            self.look_again()
        source = self.source_of(name)
        slot = self._slots.setdefault(source.name, _Slot())
        async with slot.loading:
            old = slot.loaded
            if old is not None and not (self.settings.follow and _is_newer(source, slot)):
                return old
            version = source.version()
            slot.loaded = await self._load_policy(source, old is not None) or old
            if slot.loaded is old:
                slot.failed, slot.retry = (source, version), time.monotonic() + _RETRY_SECONDS
            elif old is not None:
                self.engine.retire(old)
            assert slot.loaded is not None
            return slot.loaded

    async def judges(self, policy: Loaded, wanted: frozenset[str]) -> Judges:
        """The models that judge a policy's answers, as far as they are wanted and there. One that
        cannot be loaded leaves its number out, with the reason; the answer is still given."""
        reference = reward_model = critic = None
        why: dict[str, str] = {}
        if wanted & {"kl", "token_kl"} and policy.source.reference in self.offer.models:
            with _told("kl", why):
                reference = await self.policy(policy.source.reference)
        if "reward" in wanted and self.offer.reward_model is not None:
            with _told("reward", why):
                reward_model = await self._scalar("reward model", self.offer.reward_model)
        if "values" in wanted and self.offer.critic is not None:
            with _told("values", why):
                critic = await self._scalar("critic", self.offer.critic)
        return Judges(reference, reward_model, critic, why)

    async def in_text_thread(self, work: Callable[[], T], *, is_bounded: bool = True) -> T:
        """Run tokenizer work off the event loop, one at a time.

        Args:
            is_bounded: by the model's context; what is not waits for its like alone.
        """
        thread = self._text if is_bounded else self._long_text
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    async def in_form_thread(self, work: Callable[[float | None], T], answers: int) -> T:
        """Make what keeps answers in a form, one at a time; requests without one go on. Forms whose
        trial takes long wait for each other alone.

        Args:
            work: takes the seconds that a form's trial may take, and raises SlowFormError.
            answers: of the request, in `room`: until the form is made they take none from others.
        Raises:
            ApiError: other forms have taken too long, or as many as there is room for wait.
        """
        if self.forming + answers > self._most:
            raise self._busy(f"{self.forming} answers wait for their forms", retry_after=5)
        self.outstanding, self.forming = self.outstanding - answers, self.forming + answers
        try:
            try:
                return await self._formed(self._forms, lambda: work(_QUICK_FORM_SECONDS))
            except SlowFormError:
                return await self._formed(self._slow_forms, lambda: work(None))
        finally:
            self.outstanding, self.forming = self.outstanding + answers, self.forming - answers

    async def _formed(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        waiting = thread.submit(work)
        made = asyncio.wrap_future(waiting)
        try:
            await asyncio.wait([made], timeout=_MOST_FORM_SECONDS)
            if not waiting.cancel():  # it is done, or has begun
                return await made
        finally:
            made.cancel()
        raise self._busy(
            f"other answers' forms have taken more than {_MOST_FORM_SECONDS:g} s", retry_after=5
        )

    async def in_engine(self, work: Callable[[], T]) -> T:
        """Run model work between two steps of the engine."""
        return await asyncio.wrap_future(self.engine.compute(work))

    @contextmanager
    def room(self, answers: int) -> Iterator[None]:
        """Within: this many answers count as waiting or running.

        Raises:
            ApiError: there is no room for them now, or never.
        """
        most = self._most
        if answers > most:
            raise ApiError(f"a request must ask for at most {most} answers; got {answers}.", "n")
        if self.outstanding + answers > most:
            raise self._busy(
                f"{self.outstanding} answers run or wait, of at most {most}",
                retry_after=1 + self.outstanding // max(1, self.settings.slots),
            )
        self.outstanding += answers
        try:
            yield
        finally:
            self.outstanding -= answers

    @property
    def _most(self) -> int:
        """Answers that may run or wait."""
        return self.settings.slots + self.settings.max_queue

    def _busy(self, why: str, *, retry_after: int) -> ApiError:
        """The error of a request that is refused for now."""
        self.counters.add("refused_total", "Requests refused because the server was busy.")
        return ApiError(
            f"the server is busy: {why}. Try again later.",
            status=429,
            code="rate_limit_exceeded",
            retry_after=retry_after,
        )

    async def _scalar(self, key: str, source: ModelSource) -> LoadedScalar:
        slot = self._slots.setdefault(f"{key} {source.name}", _Slot())
        async with slot.loading:
            if slot.scalar is None:
                settings = self.load_settings
                slot.scalar = await self._load(lambda: load_scorer(source, settings), source, False)
            assert slot.scalar is not None
            return slot.scalar

    async def _load_policy(self, source: ModelSource, has_older: bool) -> Loaded | None:
        """As `_load`; a stage that has finished meanwhile is read from its folder."""
        settings, config = self.load_settings, self.offer.config
        try:
            return await self._load(
                lambda: load_policy(source, settings, config), source, has_older
            )
        except ApiError:
            finished = self._finished(source)
            if finished is None:
                raise
            return await self._load(
                lambda: load_policy(finished, settings, config), finished, has_older
            )

    def _finished(self, source: ModelSource) -> ModelSource | None:
        """What is offered in place of an unfinished stage's policy, if it has finished since."""
        if source.checkpoints is None:
            return None
        with suppress(TandemError):  # in the middle of a change
            found = self._offered().models.get(source.name)
            if found is not None and found.checkpoints is None:
                self.offer.models[source.name] = found
                return found
        return None

    async def _load(self, load: Callable[[], T], source: ModelSource, has_older: bool) -> T | None:
        try:
            loop = asyncio.get_running_loop()
            return await asyncio.shield(loop.run_in_executor(self._loader, load))
        except (TandemError, OSError, RuntimeError, MemoryError) as error:
            if has_older:  # a checkpoint that is being written; the older one still answers
                return None
            is_told = isinstance(error, TandemError | OSError)
            why = str(error) if is_told else f"{type(error).__name__}. Is there memory for it?"
            raise ApiError(f"model {source.name} cannot be loaded: {why}", status=500) from error


@contextmanager
def _told(number: str, why: dict[str, str]) -> Iterator[None]:
    """Within: a model that cannot be loaded is the reason for a number that is missing."""
    try:
        yield
    except ApiError as error:
        why[number] = str(error)


def _is_newer(source: ModelSource, slot: _Slot) -> bool:
    """Whether a model's files are another version than was loaded, and worth trying now."""
    loaded, version = slot.loaded, source.version()
    if loaded is not None and (loaded.source, loaded.version) == (source, version):
        return False
    return slot.failed != (source, version) or time.monotonic() >= slot.retry


def load_settings(settings: ServeSettings) -> LoadSettings:
    """How the models are loaded.

    Raises:
        ModelError: a GPU was asked for and is not there.
    """
    place = Place.of(settings.device, settings.dtype, settings.weights)
    return LoadSettings(place, settings.trust_remote_code)
