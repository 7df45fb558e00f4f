"""The generation bench: all sides answer the same prompts, and the figures are what they say."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTForCausalLM, PreTrainedModel

from bench import generation, limits
from bench.generation import GPU_ROWS, agreement, require_same_lengths, summary
from bench.generation_sides import (
    SIDES,
    ContinuousBatchingSide,
    GenerationWork,
    TandemSide,
    continuous_batching_fault,
    generation_start,
    require_whole,
)
from bench.harness import Cost
from bench.limits import decode_bytes, decode_rows, gemm_rate, product_seconds, real_flops
from bench.models import EOS, SHAPES, llama, sharing_weights, tiny
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.models.lora import adapters_off
from tandem.models.save import save_model

TINY = llama(16, 24, 2, 4, 64, kv_heads=2)
TINY_OPT = {**tiny(SHAPES["opt-125m"]), "hidden_size": 16, "word_embed_proj_dim": 16}
HF = ["tandem", "hf", "hf-static", "hf-cb"]


@pytest.fixture
def work() -> GenerationWork:
    return GenerationWork(
        shape=TINY, num_prompts=5, samples_per_prompt=2, prompt_tokens=(3, 7), max_new_tokens=10
    )


@pytest.mark.parametrize("side", HF)
@pytest.mark.parametrize("shape", [TINY, TINY_OPT], ids=["llama", "opt"])
def test_every_side_answers_all_prompts_anew_each_time(
    work: GenerationWork, side: str, shape: Any
) -> None:
    work = replace(work, shape=shape)
    _skip_what_upstream_breaks(work, side)
    start = generation_start(work)
    built = SIDES[side](work, start)
    first, second = (built.answers(built.generate(number, 10)) for number in (1, 2))
    for answers in (first, second):
        require_whole(work, answers)
        assert len({len(answer) for answer in answers}) > 1
    assert first != second


@pytest.mark.parametrize("side", HF)
def test_a_side_answers_the_prompt_that_it_was_given(work: GenerationWork, side: str) -> None:
    """With a head that says the last prompt's token again, the answers name their prompts."""
    work = replace(work, ends=False, max_new_tokens=4)
    _skip_what_upstream_breaks(work, side)
    start = generation_start(work)
    _echo(start.model)
    built = SIDES[side](work, start)
    answers = built.answers(built.generate(1, 4))
    last = [row.token_ids[-1] for row in start.prompts for _ in range(2)]
    assert [answer[0] for answer in answers] == last


def _skip_what_upstream_breaks(work: GenerationWork, side: str) -> None:
    if side == "hf-cb" and (fault := continuous_batching_fault(work)):
        pytest.skip(fault)


@torch.no_grad()
def _echo(model: PreTrainedModel) -> None:
    """No layer adds to the embedding, and embeddings are long: a token predicts itself."""
    table = model.get_input_embeddings().weight
    table.copy_(torch.sign(torch.randn(table.shape)) * 50)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()


def test_compiled_generation_gets_a_compiled_static_cache(work: GenerationWork) -> None:
    """Without the minutes that compiling takes: what `generate` is asked for."""
    start = generation_start(work)
    asked: dict[str, Any] = {
        name: SIDES[name](work, start).sampling(10)  # type: ignore[attr-defined]
        for name in ("hf", "hf-static", "hf-compile")
    }
    caches = {name: (c.cache_implementation, c.disable_compile) for name, c in asked.items()}
    assert caches == {
        "hf": (None, True), "hf-static": ("static", True), "hf-compile": ("static", False)
    }  # fmt: skip
    assert asked["hf-compile"].compile_config._compile_all_devices


def test_answers_end_at_half_the_limit_on_average(work: GenerationWork) -> None:
    work = replace(work, num_prompts=400, samples_per_prompt=1, max_new_tokens=16)
    start = generation_start(work)
    side = SIDES["tandem"](work, start)
    lengths = torch.tensor([len(a) for a in side.answers(side.generate(1, 16))]).float()
    assert abs(lengths.mean() - 8) < 4 * lengths.std() / 20
    left = [(lengths > n).float().mean().item() for n in (0, 5, 10)]
    assert left[1] / left[0] == pytest.approx(left[2] / left[1], abs=0.15)


def test_no_answer_ends_where_none_should(work: GenerationWork) -> None:
    work = replace(work, ends=False, num_prompts=50)
    side = SIDES["tandem"](work, generation_start(work))
    answers = side.answers(side.generate(1, 10))
    require_whole(work, answers)
    assert {len(answer) for answer in answers} == {10}


def test_a_folder_gives_model_prompts_and_texts(work: GenerationWork, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(320)
    config = LlamaConfig(**{**TINY, "vocab_size": len(tokenizer)}, max_position_embeddings=64)
    save_model(LlamaForCausalLM(config), tokenizer, tmp_path)
    start = generation_start(replace(work, folder=str(tmp_path), dtype="bf16"))
    assert start.model.dtype == torch.bfloat16
    assert all(row.token_ids[0] == 1 and len(row) in range(3, 8) for row in start.prompts)
    assert all(EOS not in row.token_ids for row in start.prompts)
    assert isinstance(start.stops.decode([5, 6]), str)


def test_sides_share_weights_and_nothing_else(work: GenerationWork) -> None:
    model = generation_start(work).model
    other = sharing_weights(model)
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    other.config._attn_implementation = "eager"
    assert model.config._attn_implementation != "eager"


def test_log_probs_agree_with_hugging_faces_forward(
    work: GenerationWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = generation_start(work)
    assert agreement(work, start) < 1e-4
    right = TandemSide.generate

    def wrong(self: Any, number: int, max_new_tokens: int) -> Any:
        rollout = right(self, number, max_new_tokens)
        return replace(rollout, rollout_logprobs=rollout.rollout_logprobs - 1e-3)

    monkeypatch.setattr(TandemSide, "generate", wrong)
    with pytest.raises(RuntimeError, match=r"log-probs of sampled tokens must agree to 0\.0001"):
        agreement(work, start)


def test_adapters_act_on_every_side(work: GenerationWork) -> None:
    work = replace(work, lora_rank=2, max_new_tokens=4, ends=False)
    start = generation_start(work)
    assert agreement(work, start) < 1e-4
    plain = start.model(torch.tensor([[3, 4]]), use_cache=False).logits
    with adapters_off(start.model):
        assert not torch.allclose(start.model(torch.tensor([[3, 4]])).logits, plain)
    for side in ("tandem", "hf"):
        model = SIDES[side](work, start).model
        assert torch.equal(model(torch.tensor([[3, 4]]), use_cache=False).logits, plain)


def test_answers_that_are_no_answers_are_refused(work: GenerationWork) -> None:
    work = replace(work, num_prompts=2, samples_per_prompt=1, max_new_tokens=3)
    require_whole(work, [(7, EOS), (7, 7, 7)])
    for answers, message in {
        ((7, EOS),): "must answer 2 times; got 1",
        ((7, EOS, 7), (7, 7, 7)): "must stop at its EOS or limit",
        ((7, 7, 7, EOS), (7, 7, 7)): "must stop at its EOS or limit",
        ((7, 7), (7, 7, 7)): "without EOS must have 3 tokens; got 2",
        ((), (7, 7, 7)): "without EOS must have 3 tokens; got 0",
    }.items():
        with pytest.raises(RuntimeError, match=message):
            require_whole(work, list(answers))
    with pytest.raises(RuntimeError, match="without EOS must have 3 tokens"):
        require_whole(replace(work, ends=False), [(7, EOS), (7, 7, 7)])


def test_lengths_that_chance_does_not_explain_are_refused() -> None:
    def answers(*lengths: int) -> list[list[tuple[int, ...]]]:
        return [[(7,) * n for n in lengths]]

    require_same_lengths({"a": answers(1, 9, 4, 3, 8, 2), "b": answers(5, 5, 9, 2, 1, 8)})
    with pytest.raises(RuntimeError, match="answers of b and a must be equally long but for"):
        require_same_lengths({"a": answers(*[1, 2] * 50), "b": answers(*[3, 4] * 50)})


def test_flops_are_those_of_each_token_once(work: GenerationWork) -> None:
    """Counted by hand: 2 per weight, 4 per head width and visible key; the head where drawn."""
    model = generation_start(work).model
    layer = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 24
    head = 16 * 64

    def of(prompt: int, answers: list[int]) -> float:
        keys = sum(range(1, prompt + 1))
        tokens = prompt
        for n in answers:
            keys += sum(range(prompt + 1, prompt + n))
            tokens += n - 1
        return 2 * (2 * tokens * layer + 4 * 16 * keys) + 2 * head * sum(answers)

    # flops_per_token takes the norms' gains and the head's bias for weights that every token meets.
    small = 2 * (2 * 2 * 16 + 16 + 64) * (3 + 0 + 3 + 5 + 9 + 0)
    expected = of(3, [1, 4]) + of(5, [10, 1])
    assert real_flops(model, [3, 5], [1, 4, 10, 1]) == pytest.approx(expected + small)


def test_decoding_reads_weights_and_keys_and_values() -> None:
    work = GenerationWork(
        shape={**TINY, "tie_word_embeddings": False},
        dtype="bf16",
        num_prompts=3,
        prompt_tokens=(5, 5),
        max_new_tokens=4,
        ends=False,
    )
    model = generation_start(work).model
    assert isinstance(model, LlamaForCausalLM)
    # All but the embedding table, whose rows are looked up; the head's bias is the bench's own.
    weights = 2 * (sum(p.numel() for p in model.parameters()) - 64 * 16)
    keys_and_values = 3 * (6 + 7 + 8) * 2 * 2 * 2 * 4 * 2
    assert decode_bytes(model, 5, 3, 3) == 3 * weights + keys_and_values
    tied = generation_start(replace(work, shape=TINY)).model
    assert decode_bytes(tied, 5, 3, 3) == decode_bytes(model, 5, 3, 3)
    opt = generation_start(replace(work, shape=TINY_OPT)).model
    assert isinstance(opt, OPTForCausalLM)
    positions = opt.model.decoder.embed_positions.weight.numel()
    whole = 2 * (sum(p.numel() for p in opt.parameters()) - positions)
    assert decode_bytes(opt, 5, 3, 3) == 3 * whole + 2 * keys_and_values


def test_rows_of_decoding_by_hand() -> None:
    """Answers of 1, 3, 3 and 5 tokens: two steps of three, two of the last alone."""
    assert decode_rows([1, 3, 3, 5]) == {3: 2, 1: 2}
    assert decode_rows([1, 1]) == {}
    assert decode_rows([]) == {}


@pytest.mark.parametrize("shape", [TINY, TINY_OPT])
def test_products_alone_are_those_of_the_model(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear layer once per number of rows and repeat, the vocabulary head where drawn."""
    model = generation_start(GenerationWork(shape=shape, max_new_tokens=4, num_prompts=2)).model
    head = model.get_output_embeddings()
    weights = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    done: dict[int, int] = {}

    def multiply(x: torch.Tensor, packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
        assert x.shape[1] == inputs
        done[len(x)] = done.get(len(x), 0) + outputs * inputs
        return x.new_empty(len(x), outputs)

    monkeypatch.setattr(limits, "linear_packed", multiply)
    # A second for every weight and row multiplied, so what is counted is exact.
    monkeypatch.setattr(
        limits, "_cpu_seconds", lambda run, products, inputs: sum(
            inputs[p.inputs].shape[0] * p(inputs[p.inputs]).shape[1] * p.inputs for p in products
        )
    )  # fmt: skip
    vocabulary = head.weight.numel()
    seconds = product_seconds(model, [300, 400], [2, 1, 4, 4], repeats=2)
    steps = 3 * (weights + vocabulary) + 2 * 2 * (weights + vocabulary)
    assert seconds == 700 * weights + 2 * vocabulary + steps
    assert done == {
        512: 2 * weights,
        2: 2 * vocabulary + 2 * (weights + vocabulary),
        3: 2 * (weights + vocabulary),
    }


def test_the_best_rate_is_a_rate() -> None:
    assert gemm_rate("fp32", repeats=1) > 1e8


def test_rates_ratios_and_shares_by_hand(work: GenerationWork) -> None:
    start = generation_start(work)
    times = {"tandem": [(1.0, 2.0), (2.0, 2.0)], "hf": [(4.0, 2.0), (4.0, 4.0)]}
    costs = {side: [{"generate": Cost(*one)} for one in of] for side, of in times.items()}
    answers = {side: [[(7,) * n] * 10 for n in of] for side, of in
               {"tandem": (2, 4), "hf": (4, 1)}.items()}  # fmt: skip
    flops = [real_flops(start.model, [len(r) for r in start.prompts], [n] * 10) for n in (2, 4)]
    table = summary(work, start, answers, costs, {"flops_per_cpu_second": flops[0]})
    assert table["tandem"]["tokens_per_wall_second"] == 20
    assert table["hf"]["tokens_per_cpu_second"] == (20 + 2.5) / 2
    assert asdict(table["hf"]["wall_ratio"]) == {"median": 5, "least": 2, "most": 8}
    assert table["hf"]["answer_tokens"] == 2.5
    assert table["tandem"]["share_of_limit"] == pytest.approx((0.5 + flops[1] / flops[0] / 2) / 2)


def test_on_a_gpu_decoding_is_what_is_left_after_a_first_token(work: GenerationWork) -> None:
    """The figures' arithmetic, with times and no GPU."""
    assert {row.ends for row in GPU_ROWS.values()} == {False}
    start = generation_start(replace(work, ends=False))
    cost = {"generate": Cost(3.0, 3.0), "prefill": Cost(1.0, 1.0)}
    limit = {"decode_bytes": 6e9, "bytes_per_second": 1e10}
    answers = {"tandem": [[(7,) * 10] * 10]}
    table = summary(replace(work, device="cuda"), start, answers, {"tandem": [cost]}, limit)
    assert table["tandem"]["tokens_per_wall_second"] == 45
    assert table["tandem"]["share_of_limit"] == pytest.approx(0.3)


def test_a_side_that_cannot_be_had_is_named_with_its_reason(
    work: GenerationWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(self: Any, number: int, max_new_tokens: int) -> Any:
        raise AttributeError("no generate_batch here\nand more")

    monkeypatch.setattr(ContinuousBatchingSide, "generate", unavailable)
    row = generation.measure_row(work, ["tandem", "hf-cb"], rounds=1)
    assert row["absent"] == {"hf-cb": "AttributeError: no generate_batch here"}
    assert row["rounds"].keys() == {"tandem"}


def test_a_row_must_be_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generation.main(["--rows", "llama-7b"])
    assert "--rows must be of stories260k-64" in capsys.readouterr().err


def test_the_rows_are_the_ones_that_were_asked_for() -> None:
    options = generation._options(
        ["--model", "folder", "--rows", "stories260k-64", "opt-125m-fp32"]
    )
    rows = generation.rows_of(options)
    assert [row.folder for row in rows.values()] == ["folder", ""]
    options = generation._options(["--device", "cuda", "--rows", "opt-1.3b", "--batch", "8", "64"])
    rows = generation.rows_of(options)
    assert {name: row.num_prompts for name, row in rows.items()} == {
        "opt-1.3b-batch-8": 8,
        "opt-1.3b-batch-64": 64,
    }
    rows = generation.rows_of(generation._options(["--rows", "smollm2-bf16", "--batch", "1"]))
    row = rows["smollm2-bf16-batch-1"]
    assert (len(rows), row.num_prompts, row.ends) == (1, 1, False)
