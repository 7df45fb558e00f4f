"""Who answers the generation bench's prompts: Tandem, and Hugging Face in four ways.

Each side has a model object of its own over the same parameters.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from bench.harness import Side, Stopwatch
from bench.models import (
    BOS,
    DTYPES,
    EOS,
    PAD,
    Shape,
    end_probability,
    model_config,
    prompt_rows,
    random_ids,
    random_model,
    set_end_probability,
    sharing_weights,
    uniform_lengths,
)
from bench.plain_hf_ppo import left_padded, sampling
from tandem.config.lora import LoraConfig
from tandem.config.schema import SamplingConfig
from tandem.data.render import Renderer
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.lora import add_lora, lora_parameters
from tandem.types import PromptRow, Rollout

Answers = list[tuple[int, ...]]
"""Token ids of each answer up to and with its EOS, the samples of a prompt side by side."""


@dataclass(frozen=True, kw_only=True)
class GenerationWork:
    """Prompts to answer with one model.

    shape: of a model with random weights. Unused where `folder` is set.
    folder: a Hugging Face folder to read the model and its tokenizer from, or "".
    prompt_tokens: least and most tokens of a prompt; the lengths between are equally likely.
    ends: answers end after lengths from a geometric distribution, cut at `max_new_tokens`, with
        about half of that as their mean. Else all have `max_new_tokens`.
    slots: answers side by side in Tandem; 0 is all of them.
    lora_rank: of adapters on every linear layer but the head, which act live on all sides; 0: none.
    """

    shape: Shape
    folder: str = ""
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    num_prompts: int = 64
    samples_per_prompt: int = 1
    prompt_tokens: tuple[int, int] = (32, 64)
    max_new_tokens: int = 128
    ends: bool = True
    slots: int = 0
    lora_rank: int = 0
    seed: int = 1

    @property
    def num_answers(self) -> int:
        """Prompts times samples."""
        return self.num_prompts * self.samples_per_prompt


@dataclass(frozen=True)
class GenerationStart:
    """Where every side starts: the model, on its device and in its type, and the prompts."""

    model: PreTrainedModel
    prompts: tuple[PromptRow, ...]
    stops: Stops


def generation_start(work: GenerationWork) -> GenerationStart:
    """Build or read the model, make the prompts, and see to the answers' lengths."""
    lengths = uniform_lengths(work.num_prompts, *work.prompt_tokens, work.seed)
    decode: Callable[[Sequence[int]], str]
    if work.folder:
        torch.manual_seed(work.seed)
        model = load_causal_lm(work.folder)
        nn.Module.to(model, work.device, DTYPES[work.dtype])
        decode = Renderer(load_tokenizer(work.folder)).decode
        prompts = _own_texts(model, lengths)
    else:
        config = model_config(work.shape, work.prompt_tokens[1] + work.max_new_tokens)
        model = random_model(config, seed=work.seed, dtype=work.dtype, device=work.device)
        decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
        prompts = random_ids(lengths, work.shape["vocab_size"], work.seed)
    if work.lora_rank:
        _adapt(model, work)
    p = end_probability(work.max_new_tokens) if work.ends else 0.0
    set_end_probability(model.requires_grad_(False), prompts[:16], p)
    return GenerationStart(model, prompt_rows(prompts), Stops((EOS,), PAD, decode))


@torch.no_grad()
def _adapt(model: PreTrainedModel, work: GenerationWork) -> None:
    """Adapters whose outputs are small and not 0, of the model's type and on its device."""
    add_lora(model, LoraConfig(rank=work.lora_rank), work.seed)
    generator = torch.Generator().manual_seed(work.seed)
    for parameter in lora_parameters(model):
        parameter.add_(
            0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
        )
    nn.Module.to(model, work.device, DTYPES[work.dtype])


def _own_texts(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Beginnings of the model's own texts: what a trained model expects to continue."""
    begin = torch.full((len(lengths), 1), BOS, device=model.device)
    texts = model.generate(  # type: ignore[operator]
        begin,
        attention_mask=torch.ones_like(begin),
        do_sample=True,
        top_k=0,
        min_new_tokens=max(lengths),
        max_new_tokens=max(lengths),
        pad_token_id=PAD,
    )
    return [texts[i, :length].tolist() for i, length in enumerate(lengths)]


class GenerationSide(Side):
    """Answers all prompts: `generate` is what is timed, `answers` makes token ids of its output."""

    def __init__(self, work: GenerationWork, start: GenerationStart) -> None:
        self.work, self.start, self.watch = work, start, Stopwatch()
        self.model = sharing_weights(start.model)

    def run(self, number: int) -> Answers:
        """Answers to all prompts; on a GPU also, before it, of one token each."""
        if self.work.device == "cuda":
            with self.watch("prefill"):
                self.generate(number, 1)
        with self.watch("generate"):
            output = self.generate(number, self.work.max_new_tokens)
        answers = self.answers(output)
        require_whole(self.work, answers)
        return answers

    @abstractmethod
    def generate(self, number: int, max_new_tokens: int) -> Any:
        """Answer every prompt with randomness of its own for each `number`."""

    @abstractmethod
    def answers(self, output: Any) -> Answers:
        """The answers in what `generate` returned."""


class TandemSide(GenerationSide):
    """`tandem.generation.generator.generate`, as PPO calls it; the round's number is the step."""

    @torch.no_grad()
    def generate(self, number: int, max_new_tokens: int) -> Rollout:
        work = self.work
        return generate(
            self.model,
            self.start.prompts,
            SamplingConfig(
                max_new_tokens=max_new_tokens, samples_per_prompt=work.samples_per_prompt
            ),
            self.start.stops,
            seed=work.seed,
            step=number,
            batch_size=work.slots or work.num_answers,
        )

    def answers(self, output: Rollout) -> Answers:
        batch = output.batch
        pairs = zip(batch.token_ids, batch.response_mask, strict=True)
        return [tuple(ids[mask].tolist()) for ids, mask in pairs]


class HFSide(GenerationSide):
    """`model.generate` with sampling: all answers in one batch, prompts padded on the left.

    settings: of its GenerationConfig, beside those that all sides share.
    """

    settings: Mapping[str, Any] = {"disable_compile": True}

    def __init__(self, work: GenerationWork, start: GenerationStart) -> None:
        super().__init__(work, start)
        # `generate` fills in what its caller leaves open from a checkpoint's own settings.
        self.model.generation_config = GenerationConfig()

    def generate(self, number: int, max_new_tokens: int) -> Any:
        """(answers, tokens) ids after the prompts, padded."""
        torch.manual_seed(self.work.seed + number)
        prompts = [row.token_ids for row in self.start.prompts]
        token_ids, attention_mask = left_padded(prompts, PAD, self.work.device)
        sequences: Tensor = self.model.generate(  # type: ignore[operator]
            token_ids,
            attention_mask=attention_mask,
            generation_config=self.sampling(max_new_tokens),
        )
        return sequences[:, token_ids.shape[1] :]

    def sampling(self, max_new_tokens: int) -> GenerationConfig:
        """What every side of Hugging Face is asked for."""
        samples = self.work.samples_per_prompt
        return sampling(max_new_tokens, EOS, PAD, num_return_sequences=samples, **self.settings)

    def answers(self, output: Any) -> Answers:
        return _cut(output.tolist())


class StaticSide(HFSide):
    """`model.generate` with a static cache, not compiled."""

    settings: Mapping[str, Any] = {"disable_compile": True, "cache_implementation": "static"}


class CompiledSide(HFSide):
    """`model.generate` with a static cache and the compiled forward."""

    settings: Mapping[str, Any] = {"disable_compile": False, "cache_implementation": "static"}

    def sampling(self, max_new_tokens: int) -> GenerationConfig:
        config, compiling = super().sampling(max_new_tokens), CompileConfig()
        compiling._compile_all_devices = True  # type: ignore[assignment] # not GPUs alone
        config.compile_config = compiling
        return config


def continuous_batching_fault(work: GenerationWork) -> str | None:
    """What hinders this version of transformers from answering all of `work` by `generate_batch`;
    None: nothing that is known."""
    version = transformers.__version__
    if version.startswith("5.17.") and work.samples_per_prompt > 1:
        return (
            f"transformers {version} returns the first of a prompt's answers alone: its "
            "generate_batch puts results in order by the prompts' names and drops the others"
        )
    if version.startswith("5.24.") and work.shape["model_type"] == "opt":
        return (
            f"transformers {version} cannot run opt: its forward calls get_seq_length, which the "
            "cache of generate_batch (PagedAttentionCache) has not"
        )
    return None


class ContinuousBatchingSide(HFSide):
    """transformers' continuous batching, `model.generate_batch`, with what suits it best.

    Left to itself it takes most of the machine's memory for its cache and fills it with zeros at
    every call, which is most of the time. So the cache is what the work needs, the manager is
    kept from call to call, and on a CPU, where its attention is over all running answers' tokens
    under a mask, about 4096 tokens run at a time.
    """

    settings: Mapping[str, Any] = {}

    def __init__(self, work: GenerationWork, start: GenerationStart) -> None:
        super().__init__(work, start)
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

    def generate(self, number: int, max_new_tokens: int) -> Any:
        """The requests' outputs, a prompt's samples side by side.

        Raises:
            RuntimeError: an answer is missing or failed; `generate_batch` itself only logs that.
        """
        by_request: Mapping[str, Any] = self.model.generate_batch(  # type: ignore[operator]
            [list(row.token_ids) for row in self.start.prompts],
            generation_config=self.sampling(max_new_tokens),
            continuous_batching_config=self.config,
            max_new_tokens=max_new_tokens,
            persistent_manager=True,
        )
        outputs = list(by_request.values())
        errors = [output.error for output in outputs if output.error is not None]
        if errors or len(outputs) != self.work.num_answers:
            fault = continuous_batching_fault(self.work)
            raise RuntimeError(
                f"generate_batch must answer {self.work.num_answers} times; got {len(outputs)} "
                f"answers, {len(errors)} failed: {errors[:1]}."
                + (f" {fault}. Try another version." if fault else "")
            )
        return outputs

    def answers(self, output: Any) -> Answers:
        return _cut(one.generated_tokens for one in output)


SIDES: Mapping[str, Callable[[GenerationWork, GenerationStart], GenerationSide]] = {
    "tandem": TandemSide,
    "hf": HFSide,
    "hf-static": StaticSide,
    "hf-cb": ContinuousBatchingSide,
    "hf-compile": CompiledSide,
}


def _cut(rows: Iterable[Sequence[int]]) -> Answers:
    """Each row up to and with its first EOS."""
    ids = map(tuple, rows)
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in ids]


def require_whole(work: GenerationWork, answers: Answers) -> None:
    """As many answers as asked for, each up to and with its EOS or of the whole length.

    Raises:
        RuntimeError: one is neither.
    """
    if len(answers) != work.num_answers:
        raise RuntimeError(
            f"every side must answer {work.num_answers} times; got {len(answers)} answers."
        )
    for answer in answers:
        ended = bool(answer) and answer[-1] == EOS and work.ends
        if EOS in answer[:-1] or len(answer) > work.max_new_tokens:
            raise RuntimeError(f"an answer must stop at its EOS or limit; got {answer}.")
        if not ended and len(answer) != work.max_new_tokens:
            raise RuntimeError(
                f"an answer without EOS must have {work.max_new_tokens} tokens; got {len(answer)}."
            )
