"""The engine as a whole: the text of an answer is its own, whatever runs beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.schema import SamplingConfig
from tandem.engine.forward import response_logprobs
from tandem.generation import make_runner as choice
from tandem.generation.generator import generate
from tandem.generation.make_runner import make_runner
from tandem.generation.native_runner import NativeRunner, runs_natively
from tandem.generation.runner import Runner, TwinRunner, new_memory
from tandem.generation.sampler import sequence_key
from tandem.generation.stops import Stops
from tandem.generation.streaming import stream
from tandem.models.frozen import freeze_quantized
from tandem.models.lora import adapters_off, add_lora, keep_start, lora_layers, lora_parameters
from tandem.models.quantized import PackedWeight
from tandem.models.token_layers import token_rows
from tandem.models.twin import shares_every_tensor
from tandem.ops import dense, native
from tandem.ops.attention_context import KVMemory
from tandem.ops.sizes import SHARE_TO_PACK
from tandem.types import PromptRow, Rollout, Source

from ..models.families import FAMILIES, tiny_model

STOP = 2
STOPS = Stops((STOP,), 0, lambda ids: " ".join(map(str, ids)))
needs_native = pytest.mark.skipif(not native.available(), reason=native.why_not())


def prompts(*lengths: int) -> list[PromptRow]:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i, n in enumerate(lengths):
        ids = torch.randint(4, 99, (n,), generator=generator).tolist()
        rows.append(PromptRow(tuple(ids), (), {}, Source("test", "test", i + 1)))
    return rows


def answer(
    model: PreTrainedModel,
    rows: list[PromptRow],
    *,
    numbers: Any = None,
    batch_size: int = 64,
    kv_blocks: int | None = None,
    **options: Any,
) -> Rollout:
    return generate(
        model,
        rows,
        SamplingConfig(**{"max_new_tokens": 24, **options}),
        STOPS,
        seed=3,
        step=1,
        prompt_numbers=numbers,
        batch_size=batch_size,
        kv_blocks=kv_blocks,
    )


def by_row(rollout: Rollout) -> list[tuple[list[int], list[float]]]:
    masks = rollout.batch.response_mask
    return [
        (rollout.batch.token_ids[i, mask].tolist(), rollout.rollout_logprobs[i, mask].tolist())
        for i, mask in enumerate(masks)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_hugging_faces(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(5, 17, 16, 1)
    ours = answer(model, rows, top_k=1)
    greedy = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=STOP, pad_token_id=0)
    for row, (ids, _) in zip(rows, by_row(ours), strict=True):
        own = model.generate(torch.tensor([row.token_ids]), generation_config=greedy)
        assert ids == own[0, len(row) :].tolist()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_training_forwards_to_the_bit(
    family: str, dtype: torch.dtype
) -> None:
    model = tiny_model(family).to(dtype)
    made = answer(model, prompts(5, 17, 16, 1, 30), samples_per_prompt=2, batch_size=4)
    with torch.enable_grad():
        scored, entropy = response_logprobs(model, made.batch, with_entropy=True)
    assert scored.requires_grad
    assert torch.equal(made.rollout_logprobs, scored.detach())
    assert torch.equal(made.rollout_entropy, entropy.detach())


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [50_257, 151_936])
def test_so_they_are_with_a_real_vocabulary(
    vocabulary: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """GPT-2's, which no vector divides, and Qwen's; a head far larger than the narrow model."""
    model = tiny_model("llama", vocab_size=vocabulary, hidden_size=24, num_hidden_layers=1)
    model = model.to(dtype)
    rows = prompts(5, 17, 1)
    options = {"samples_per_prompt": 2, "max_new_tokens": 6}
    threads(1)
    made = answer(model, rows, **options)
    assert by_row(answer(model, rows, batch_size=1, **options)) == by_row(made)
    with torch.enable_grad():
        scored, entropy = response_logprobs(model, made.batch, with_entropy=True)
    assert torch.equal(made.rollout_logprobs, scored.detach())
    assert torch.equal(made.rollout_entropy, entropy.detach())
    threads(2)
    assert by_row(answer(model, rows, **options)) == by_row(made)
    assert torch.equal(made.rollout_logprobs, response_logprobs(model, made.batch)[0].detach())


@needs_native
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_an_answer_does_not_know_its_neighbours(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(5, 17, 16, 1, 30, 7, 8, 9)
    whole = by_row(answer(model, rows))
    assert by_row(answer(model, rows, batch_size=3)) == whole
    assert by_row(answer(model, rows, kv_blocks=4)) == whole, "what does not fit waits"
    order = [6, 2, 0, 7, 1, 3, 5, 4]
    shuffled = by_row(answer(model, [rows[i] for i in order], numbers=order))
    assert shuffled == [whole[i] for i in order]
    for i, row in enumerate(rows):
        assert by_row(answer(model, [row], numbers=[i])) == [whole[i]]


@needs_native
def test_samples_share_their_prompt_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    rows = prompts(33, 32, 3)
    shared = by_row(answer(model, rows, samples_per_prompt=3))
    assert len({tuple(ids) for ids, _ in shared}) == 9
    alone = []
    for i, row in enumerate(rows):
        for sample in range(3):
            key = sequence_key(3, 1, i, sample)
            monkeypatch.setattr("tandem.generation.request_maker.sequence_key", lambda *_, k=key: k)
            alone += by_row(answer(model, [row]))
            monkeypatch.undo()
    assert alone == shared


@needs_native
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_runs_prompts_and_decodes_as_the_modules_do(
    family: str, dtype: torch.dtype
) -> None:
    require_equal_runners(tiny_model(family).to(dtype))


@needs_native
@pytest.mark.parametrize(
    "parts", ["all", "some", "int8", "nf4", "nf4 and all", "off", "off, from a start"]
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_computes_adapters_and_quantized_weights_as_the_modules_do(
    family: str, dtype: torch.dtype, parts: str
) -> None:
    model = tiny_model(family)
    kind = parts.split()[0]
    if kind in ("int8", "nf4"):
        freeze_quantized(model.requires_grad_(False), kind)
    if parts not in ("int8", "nf4"):
        targets = ("v_proj", "o_proj", "up_proj") if parts == "some" else ("all-linear",)
        add_lora(model, LoraConfig(rank=3, alpha=7.0, targets=targets), seed=0)
        move_adapters(model)
    if parts == "off, from a start":
        keep_start(model)
        move_adapters(model)
    model.to(dtype)
    with adapters_off(model) if kind.startswith("off") else nullcontext():
        apart = require_equal_runners(model)
        plain = require_equal_runners(tiny_model(family).to(dtype))
    assert torch.equal(apart, plain) == (parts == "off")


def move_adapters(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def require_equal_runners(model: PreTrainedModel) -> Tensor:
    """The logits of prompts, their parts and some steps, the same from modules and in one call."""
    tokens = torch.arange(4, 60)
    logits = []
    assert runs_natively(model, 1 << 40)
    runners: list[Callable[[KVMemory], Runner]] = [
        lambda memory: TwinRunner(model, memory),
        lambda memory: NativeRunner(model, memory, 60),
        lambda memory: NativeRunner(model, memory, 60, unpacks=False),
    ]
    for made in runners:
        memory = new_memory(model, 8)
        runner = made(memory)
        tables = torch.tensor([[2, 0, 6], [1, 3, 4]], dtype=torch.int32)
        with torch.no_grad():
            steps = [
                runner.prefill(tokens[:31], [16, 15], tables),
                # The first prompt in a second part, and another from its beginning.
                runner.prefill(tokens[31:55], [19, 5], tables, [16, 0]),
            ]
            positions = torch.tensor([35, 5])
            for token in (5, 6, 7):
                steps.append(runner.decode(torch.tensor([token, token + 1]), positions, tables))
                positions = positions + 1
        logits.append(torch.stack(steps))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    return logits[0]


@needs_native
@pytest.mark.parametrize("kind", ["", "nf4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # an own head, and a tied one
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_computes_trained_rows_as_the_modules_and_training_do(
    family: str, dtype: torch.dtype, kind: str
) -> None:
    model = tiny_model(family)
    add_lora(model, LoraConfig(rank=3), seed=0, tokens=(5, 6, 40, 41, 98))
    if kind:
        freeze_quantized(model, kind)
    move_adapters(model)
    with torch.no_grad():
        for rows in token_rows(model):
            rows.weight += 0.3 * torch.randn(rows.weight.shape)
    model.to(dtype)
    own = require_equal_runners(model)
    with adapters_off(model):
        assert not torch.equal(require_equal_runners(model), own)
    made = answer(model, prompts(5, 17, 16, 30), samples_per_prompt=3)
    with torch.enable_grad():
        scored, _ = response_logprobs(model, made.batch)
    assert torch.equal(made.rollout_logprobs, scored.detach())
    assert torch.isin(made.batch.token_ids, torch.tensor([5, 6, 40, 41, 98])).any()


@needs_native
def test_the_runner_is_chosen_by_what_the_model_is() -> None:
    model = tiny_model("llama")
    assert type(make_runner(model, new_memory(model, 1), 16)) is NativeRunner
    other = tiny_model("opt")
    assert type(make_runner(other, new_memory(other, 1), 16)) is TwinRunner
    add_lora(model, LoraConfig(rank=2, dropout=0.5), seed=0)
    assert type(make_runner(model, new_memory(model, 1), 16)) is NativeRunner
    assert type(make_runner(model.train(), new_memory(model, 1), 16)) is TwinRunner
    mixed = tiny_model("llama")
    add_lora(mixed, LoraConfig(rank=2), seed=0)
    lora_layers(mixed)[0][1].alpha = 5.0
    assert type(make_runner(mixed, new_memory(mixed, 1), 16)) is TwinRunner  # of two scales


@needs_native
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_weights_are_read_as_they_are_where_there_is_no_room_for_a_copy(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").requires_grad_(False)
    copied: list[int] = []
    pack = dense.pack_weight

    def packed(weight: Tensor) -> Tensor:
        copied.append(weight.numel())
        return pack(weight)

    freeze_quantized(model, kind)
    monkeypatch.setattr(dense, "pack_weight", packed)
    weights = sum(m.numel() for m in model.modules() if isinstance(m, PackedWeight))
    for room, expected in ((weights, weights), (weights - 1, 0)):
        copied.clear()
        free = round(4 * room / SHARE_TO_PACK)
        monkeypatch.setattr(choice, "free_bytes", lambda device, free=free: free)
        runner = make_runner(model, new_memory(model, 1), 16)
        assert type(runner) is NativeRunner
        assert sum(copied) == expected


@needs_native
def test_rows_of_half_bytes_that_end_within_one_are_unpacked_by_the_modules() -> None:
    model = tiny_model("llama", intermediate_size=39).requires_grad_(False)
    freeze_quantized(model, "nf4")
    assert type(make_runner(model, new_memory(model, 1), 16)) is TwinRunner
    assert len(by_row(answer(model, prompts(4), max_new_tokens=2))) == 1
    other = tiny_model("llama", intermediate_size=39).requires_grad_(False)
    freeze_quantized(other, "int8")
    require_equal_runners(other)


def test_adapters_generate_live_and_no_weight_changes_however_often() -> None:
    model = tiny_model("llama")
    add_lora(model, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.2
    before = copy.deepcopy(model.state_dict())
    rows = prompts(4)
    first = by_row(answer(model, rows, max_new_tokens=2))
    for _ in range(100):
        model.train()
        model.eval()
        assert by_row(answer(model, rows, max_new_tokens=2)) == first
    assert shares_every_tensor(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_streamed_answer_is_the_generated_one() -> None:
    model = tiny_model("llama")
    sampling = SamplingConfig(max_new_tokens=20)
    ids = prompts(6)[0].token_ids
    streamed = list(stream(model, ids, sampling, STOPS, seed=9))
    assert streamed == list(stream(model, ids, sampling, STOPS, seed=9))
    assert 0 < len(streamed) <= 20


def test_a_stop_string_ends_an_answer_across_tokens() -> None:
    model = tiny_model("llama")
    rows = prompts(6)
    ids, _ = by_row(answer(model, rows, max_new_tokens=30))[0]
    words = [str(token) for token in ids]
    stop = f"{words[2][-1]} {words[3]}"
    cut = answer(model, rows, max_new_tokens=30, stop_strings=(stop,))
    text = " ".join(words)
    assert cut.responses[0] == text[: text.index(stop)]
    assert stop in " ".join(map(str, by_row(cut)[0][0]))
    assert bool(cut.finished[0])


def test_a_family_whose_attention_is_its_own_generates_too() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = prompts(5, 9)
    made = answer(model, rows, samples_per_prompt=2, repetition_penalty=1.2)
    scored, _ = response_logprobs(model, made.batch)
    assert torch.allclose(made.rollout_logprobs, scored, atol=1e-4)
    alone = answer(model, rows[:1], samples_per_prompt=2, repetition_penalty=1.2)
    assert [ids for ids, _ in by_row(alone)] == [ids for ids, _ in by_row(made)[:2]]
