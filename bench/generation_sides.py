"""Who answers the generation bench's prompts: Tandem, and Hugging Face in four ways.

Each side has a model object of its own over the same parameters. `generate` is what is timed and
returns the side's own kind of output; `answers` makes token ids of it afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from bench.generation_work import EOS, PAD, GenerationStart, GenerationWork, sharing_weights
from tandem.config.schema import SamplingConfig
from tandem.generation.generator import generate
from tandem.types import Rollout

Answers = list[tuple[int, ...]]
"""Token ids of each answer up to and with its EOS, the samples of a prompt side by side."""


class Side(Protocol):
    """One way to answer all prompts of the work."""

    def generate(self, number: int, max_new_tokens: int) -> Any:
        """Answer every prompt with randomness of its own for each `number`."""
        ...

    def answers(self, output: Any) -> Answers:
        """The answers in what `generate` returned."""
        ...


class TandemSide:
    """`tandem.generation.generator.generate`, as PPO calls it."""

    def __init__(self, work: GenerationWork, start: GenerationStart, slots: int = 0) -> None:
        """`slots`: answers side by side; 0 is all of them."""
        self.work, self.start = work, start
        self.model = sharing_weights(start.model)
        self.slots = slots or work.num_answers

    @torch.no_grad()
    def generate(self, number: int, max_new_tokens: int) -> Rollout:
        """As `Side` says; the round's number is the run's step."""
        return generate(
            self.model,
            self.start.prompts,
            SamplingConfig(
                max_new_tokens=max_new_tokens, samples_per_prompt=self.work.samples_per_prompt
            ),
            self.start.stops,
            seed=self.work.seed,
            step=number,
            batch_size=self.slots,
        )

    def answers(self, output: Rollout) -> Answers:
        """As `Side` says."""
        batch = output.batch
        return [
            tuple(ids[mask].tolist())
            for ids, mask in zip(batch.token_ids, batch.response_mask, strict=True)
        ]


class HFSide:
    """`model.generate` with sampling: all answers in one batch, prompts padded on the left."""

    def __init__(self, work: GenerationWork, start: GenerationStart, cache: str = "") -> None:
        """`cache`: "" for the default (dynamic), "static", or "compile": static and compiled."""
        self.work, self.start = work, start
        self.model = _plain_model(start)
        self.settings: dict[str, Any] = {"disable_compile": True}
        if cache:
            self.settings["cache_implementation"] = "static"
        if cache == "compile":
            compiling = CompileConfig()
            compiling._compile_all_devices = True  # type: ignore[assignment] # not GPUs alone
            self.settings |= {"disable_compile": False, "compile_config": compiling}

    def generate(self, number: int, max_new_tokens: int) -> Tensor:
        """As `Side` says: (answers, tokens) ids after the prompts, padded."""
        torch.manual_seed(self.work.seed + number)
        prompts = [row.token_ids for row in self.start.prompts]
        width = max(map(len, prompts))
        token_ids = torch.full((len(prompts), width), PAD)
        attention_mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            token_ids[i, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[i, width - len(prompt) :] = 1
        sequences: Tensor = self.model.generate(  # type: ignore[operator]
            token_ids.to(self.work.device),
            attention_mask=attention_mask.to(self.work.device),
            generation_config=_sampling(self.work, max_new_tokens, **self.settings),
        )
        return sequences[:, width:]

    def answers(self, output: Tensor) -> Answers:
        """As `Side` says."""
        return _cut(output.tolist())


class ContinuousBatchingSide:
    """transformers' continuous batching, `model.generate_batch`, with what suits it best.

    Left to itself it takes most of the machine's memory for its cache and fills it with zeros at
    every call, which is most of the time. So the cache is what the work needs, the manager is
    kept from call to call, and on a CPU, where its attention is over all running answers' tokens
    under a mask, about 4096 tokens run at a time.
    """

    def __init__(self, work: GenerationWork, start: GenerationStart) -> None:
        self.work, self.start = work, start
        self.model = _plain_model(start)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        page = 256
        longest = work.prompt_tokens[1] + work.max_new_tokens
        settings: dict[str, Any] = {
            "num_blocks": (work.num_answers + 1) * -(-longest // page),
            "allow_block_sharing": work.samples_per_prompt > 1,
        }
        # transformers 5.17 calls a page a block.
        names = {field.name for field in fields(ContinuousBatchingConfig)}
        settings["page_size" if "page_size" in names else "block_size"] = page
        if work.device == "cpu":
            settings["max_batch_tokens"] = 1024
            settings["max_requests_per_batch"] = max(1, 4096 // longest)
        self.config = ContinuousBatchingConfig(**settings)

    def generate(self, number: int, max_new_tokens: int) -> list[Any]:
        """As `Side` says: the requests' outputs, a prompt's samples side by side.

        Raises:
            RuntimeError: an answer is missing or failed; `generate_batch` itself only logs that.
        """
        by_request: Mapping[str, Any] = self.model.generate_batch(  # type: ignore[operator]
            [list(row.token_ids) for row in self.start.prompts],
            generation_config=_sampling(self.work, max_new_tokens),
            continuous_batching_config=self.config,
            max_new_tokens=max_new_tokens,
            persistent_manager=True,
        )
        outputs = list(by_request.values())
        errors = [output.error for output in outputs if output.error is not None]
        if errors or len(outputs) != self.work.num_answers:
            raise RuntimeError(
                f"generate_batch must answer {self.work.num_answers} times; got {len(outputs)} "
                f"answers, {len(errors)} failed: {errors[:1]}."
            )
        return outputs

    def answers(self, output: Iterable[Any]) -> Answers:
        """As `Side` says."""
        return _cut(one.generated_tokens for one in output)


def make_side(name: str, work: GenerationWork, start: GenerationStart, slots: int = 0) -> Side:
    """The side of that name, one of SIDES."""
    if name == "tandem":
        return TandemSide(work, start, slots)
    if name == "hf-cb":
        return ContinuousBatchingSide(work, start)
    return HFSide(work, start, name.removeprefix("hf").removeprefix("-"))


SIDES = ("tandem", "hf", "hf-static", "hf-cb", "hf-compile")


def _plain_model(start: GenerationStart) -> PreTrainedModel:
    model = sharing_weights(start.model)
    # `generate` fills in what its caller leaves open from a checkpoint's own settings.
    model.generation_config = GenerationConfig()
    return model


def _sampling(work: GenerationWork, max_new_tokens: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        num_return_sequences=work.samples_per_prompt,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **more,
    )


def _cut(rows: Iterable[Sequence[int]]) -> Answers:
    """Each row up to and with its first EOS."""
    answers = []
    for row in rows:
        ids = tuple(row)
        answers.append(ids[: ids.index(EOS) + 1] if EOS in ids else ids)
    return answers
