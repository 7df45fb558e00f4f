"""What shared prefixes and chunked prefill save: turns of a chat, of a rollout's conversations with
an environment, prompts that begin alike, in generation and in training, stalls.

    python bench/prefixes.py --json prefixes.json

These works, each with and without, in CPU seconds of one process, the two ways in turn:

    chat     one conversation of --turns turns; each prompt repeats all turns before
    rollout  samples of 8 prompts, conversations of --answers answers with an environment
    shot     prompts that begin with the same examples, one short answer each, as in a rollout
    beside   a long prompt comes in while others decode: their longest wait for a token
    alike    32 prompts with a system prompt of --system tokens, one answer each: their log-probs
             (score), and a forward and backward (train)
    alike-8  the same of 4 prompts and 8 answers each, which share their prompt both ways
    apart    32 prompts that have 8 tokens in common, too few to share: what looking for it costs

The first three count the tokens of prompts that were run, the last three all that were computed;
answers and log-probs are the same both ways, and that is checked. `beside` has the prompt in parts
of --chunk tokens, or whole.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import PreTrainedModel

from bench.models import (
    PAD,
    SHAPES,
    model_config,
    prompt_rows,
    random_ids,
    random_model,
    uniform_lengths,
)
from bench.report import Report, count, parser, table
from tandem.config.schema import SamplingConfig
from tandem.engine.forward import rank_micro_batches_of, response_logprobs
from tandem.generation.conversing import ConversationRow
from tandem.generation.generator import generate
from tandem.generation.runner import TwinRunner
from tandem.generation.stops import Stops
from tandem.generation.streaming import Conversations
from tandem.models import beginnings
from tandem.models.packed import packed_rows
from tandem.parallel.world import World
from tandem.types import Message, Source, TokenBatch, TokenRow

STOPS = Stops((), 0, lambda ids: " ".join(map(str, ids)))
Measured = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every work both ways; returns what --json writes."""
    flags = parser(__doc__, "rounds threads dtype micro-batch-tokens default-allocator")
    flags.add_argument("--shape", choices=sorted(SHAPES), default="llama-22m")
    flags.add_argument("--turns", type=count, default=8)
    flags.add_argument("--answers", type=count, default=4, help="of a rollout's conversations")
    flags.add_argument("--chunk", type=count, default=128, help="tokens of a part of a prompt")
    flags.add_argument("--system", type=count, default=175, help="tokens of a system prompt")
    flags.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    options = flags.parse_args(arguments)
    options.micro_batch_tokens = options.micro_batch_tokens or 8192
    if options.tiny:
        options.shape, options.turns, options.rounds, options.chunk = "a", 3, 1, 16
        options.system = 40
    report = Report(options)
    positions = 96 + 160 * options.turns if not options.tiny else 320
    model = random_model(model_config(SHAPES[options.shape], 2 * positions), dtype=options.dtype)
    for name in options.works:
        rows = compared(WORKS[name], model, options)
        report.result[name] = rows
        report.console.print(_table(name, rows), highlight=False)
        report.keep()
    return report.end()


def chat(model: PreTrainedModel, options: Namespace, shares: bool) -> tuple[Measured, Any]:
    """A conversation: a system prompt of 96 tokens, then messages of 96 and answers of 64."""
    size = 24 if options.tiny else 96
    vocabulary = model.config.vocab_size
    texts = random_ids([size] * (options.turns + 1), vocabulary, 3)
    sampling = SamplingConfig(max_new_tokens=size * 2 // 3)
    history, said = list(texts[0]), []
    most = (options.turns + 2) * 2 * size
    talk = Conversations(model, STOPS, slots=1, max_tokens=most, share_prefixes=shares)
    with talk, _counting() as measured:
        for turn in range(options.turns):
            history += texts[turn + 1]
            handle = talk.submit(history, sampling, seed=turn)
            while not handle.ended:
                talk.step()
            history += handle.token_ids
            said.append(handle.token_ids)
    return measured.result(), said


class Says:
    """An environment that says the same 32 tokens to every answer (a `Conversing`)."""

    def __init__(self, ids: Sequence[int], max_answers: int, longest: int) -> None:
        self.max_answers, self.longest = max_answers, longest
        self._ids, self._ready = tuple(ids), list[tuple[int, ConversationRow]]()

    def answered(
        self, place: int, row: ConversationRow, token_ids: Sequence[int], text: str
    ) -> None:
        """Answer at once."""
        said = (Message("assistant", text), Message("user", "more"))
        token_ids = (*row.token_ids, *token_ids, *self._ids)
        row = replace(row, token_ids=token_ids, messages=(*row.messages, *said))
        self._ready.append((place, row))

    def going_on(self, *, wait: bool) -> Sequence[tuple[int, ConversationRow]]:
        """All that it has answered."""
        ready, self._ready = self._ready, []
        return ready


def rollout(model: PreTrainedModel, options: Namespace, shares: bool) -> tuple[Measured, Any]:
    """8 prompts of 96 tokens, 4 conversations each; answers of up to 64, 32 in the mean."""
    size, vocabulary = 24 if options.tiny else 96, model.config.vocab_size
    *prompts, heard = random_ids([size] * 8 + [size // 3], vocabulary, 9)
    limit = size * 2 // 3
    sampling = SamplingConfig(max_new_tokens=limit, samples_per_prompt=4)
    # Random weights draw all tokens about equally often: every 48th ends an answer.
    stops = Stops(tuple(range(0, vocabulary, 48)), 0, STOPS.decode)
    talk = Says(heard, options.answers, size + options.answers * (limit + size // 3))
    rows = prompt_rows(prompts)
    with _counting() as measured:
        made = generate(model, rows, sampling, stops, seed=1, share_prompts=shares, conversing=talk)
    return measured.result(), made.batch.token_ids.tolist()


def shot(model: PreTrainedModel, options: Namespace, shares: bool) -> tuple[Measured, Any]:
    """16 prompts of 512 tokens alike and 32 of their own; 16 new tokens each."""
    alike, own, many = (32, 8, 4) if options.tiny else (512, 32, 16)
    vocabulary = model.config.vocab_size
    (examples,) = random_ids([alike], vocabulary, 5)
    rows = prompt_rows([*examples, *ids] for ids in random_ids([own] * many, vocabulary, 6))
    sampling = SamplingConfig(max_new_tokens=16)
    with _counting() as measured:
        made = generate(model, rows, sampling, STOPS, seed=1, share_prompts=shares)
    return measured.result(), made.responses


def beside(model: PreTrainedModel, options: Namespace, in_parts: bool) -> tuple[Measured, Any]:
    """7 answers that decode, and a prompt of 1,024 tokens that comes after their eighth token."""
    few, long = (20, 128) if options.tiny else (40, 1024)
    vocabulary = model.config.vocab_size
    *prompts, last = random_ids([16] * 7 + [long], vocabulary, 8)
    sampling = SamplingConfig(max_new_tokens=few)
    chunk = options.chunk if in_parts else 2**31
    most = long + few
    with Conversations(model, STOPS, slots=8, max_tokens=most, chunk_tokens=chunk) as talk:
        handles = [talk.submit(ids, sampling, seed=i) for i, ids in enumerate(prompts)]
        with _counting() as measured:
            for step in range(1000):
                if step == 8:
                    handles.append(talk.submit(last, sampling, seed=9))
                begin = time.process_time()
                events = talk.step()
                if any(handle in handles[:7] and new for handle, new in events):
                    measured.waits.append(time.process_time() - begin)
                if not talk.busy:
                    break
    found = measured.result()
    found["longest_wait_seconds"] = max(measured.waits)
    found["median_wait_seconds"] = statistics.median(measured.waits)
    return found, [handle.token_ids for handle in handles]


def learned(
    model: PreTrainedModel, options: Namespace, shares: bool, *, samples: int = 1, alike: bool
) -> tuple[Measured, Any]:
    """The log-probs of 32 answers of 50 to 150 tokens to questions of 40, and their gradient."""
    system, question, answer, many = options.system, 40, (50, 150), 32
    if options.tiny:
        question, answer, many = 8, (4, 12), 16
    prompts = many // samples
    begins, *questions = random_ids(
        [system if alike else 8] + [question + (0 if alike else system - 8)] * prompts,
        model.config.vocab_size, 4,
    )  # fmt: skip
    answers = random_ids(uniform_lengths(many, *answer, seed=5), model.config.vocab_size, 6)
    source = Source("bench", "bench", 1)
    rows = []
    for i, ids in enumerate(answers):
        prompt = (*begins, *questions[i // samples])
        mask = (False,) * len(prompt) + (True,) * len(ids)
        rows.append(TokenRow((*prompt, *ids), mask, source))
    batch = TokenBatch.from_rows(rows, PAD)
    measured: Measured = {"computed_tokens": 0}
    found: list[Any] = []
    model.zero_grad()  # the gradients' memory is there from the first round on
    with _with_beginnings(shares):
        for phase, learns in (("score", False), ("train", True)):
            begin = time.process_time()
            with torch.set_grad_enabled(learns):
                parts = rank_micro_batches_of(batch, options.micro_batch_tokens, World(), [model])
                for numbers, _ in parts:
                    logprobs, _ = response_logprobs(model, batch.select(numbers))
                    if learns:
                        logprobs.sum().backward()
                    found.append((numbers.tolist(), logprobs.detach()))
            measured[f"{phase}_cpu_seconds"] = time.process_time() - begin
        for numbers, _ in parts:
            part = batch.select(numbers)
            measured["computed_tokens"] += len(
                packed_rows(part, part.attention_mask, shares=True).token_ids
            )
    said = {
        (place >= len(found) // 2, row): numbers[: int(batch.attention_mask[row].sum())].tolist()
        for place, (rows_of, logprobs) in enumerate(found)
        for row, numbers in zip(rows_of, logprobs, strict=True)
    }
    return measured, said


@contextmanager
def _with_beginnings(shares: bool) -> Iterator[None]:
    """Within: different prompts share what they begin with, or nobody looks for it."""
    found = beginnings.find_beginnings
    if not shares:
        beginnings.find_beginnings = lambda ids, groups: {}
    try:
        yield
    finally:
        beginnings.find_beginnings = found


WORKS: dict[str, Callable[[PreTrainedModel, Namespace, bool], tuple[Measured, Any]]] = {
    "chat": chat,
    "rollout": rollout,
    "shot": shot,
    "beside": beside,
    "alike": partial(learned, alike=True),
    "alike-8": partial(learned, alike=True, samples=8),
    "apart": partial(learned, alike=False),
}


def compared(
    function: Callable[[PreTrainedModel, Namespace, bool], tuple[Measured, Any]],
    model: PreTrainedModel,
    options: Namespace,
) -> dict[str, Any]:
    """Medians of both ways over the rounds, one unmeasured before, and their ratios.

    Raises:
        RuntimeError: the two gave other answers.
    """
    found: dict[bool, list[Measured]] = {True: [], False: []}
    for number in range(options.rounds + 1):
        answers = {}
        for way in (True, False):
            measured, answers[way] = function(model, options, way)
            if number:
                found[way].append(measured)
        if answers[True] != answers[False]:
            raise RuntimeError(f"{function} must give the same both ways; it did not.")
    medians = {
        name: {key: statistics.median(one[key] for one in found[way]) for key in found[way][0]}
        for name, way in (("with", True), ("without", False))
    }
    ratios = {
        key: medians["with"][key] / medians["without"][key]
        for key in medians["with"]
        if medians["without"][key]
    }
    return {**medians, "ratios": ratios}


class _counting:  # noqa: N801 - a context manager
    """CPU seconds inside, and the tokens that prefill ran."""

    def __enter__(self) -> _counting:
        self.tokens, self.largest, self.waits = 0, 0, list[float]()
        self._plain = TwinRunner.prefill
        plain = self._plain

        def prefill(runner: TwinRunner, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.tokens += len(token_ids)
            self.largest = max(self.largest, len(token_ids))
            return plain(runner, token_ids, *rest)

        TwinRunner.prefill = prefill  # type: ignore[method-assign, assignment]
        self._begin = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self._begin
        TwinRunner.prefill = self._plain  # type: ignore[method-assign]

    def result(self) -> Measured:
        return {
            "cpu_seconds": self.seconds,
            "prefilled_tokens": self.tokens,
            "largest_forward_tokens": self.largest,
        }


def _table(name: str, rows: dict[str, Any]) -> Any:
    keys = list(rows["with"])
    lines = [
        (key, f"{rows['with'][key]:.4g}", f"{rows['without'][key]:.4g}",
         f"{rows['ratios'].get(key, float('nan')):.2f}")
        for key in keys
    ]  # fmt: skip
    return table(name, "medians of the rounds", ("measure",), ("with", "without", "ratio"), lines)


if __name__ == "__main__":
    main()
