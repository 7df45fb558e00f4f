"""TFLOP/s against a count of every matrix product that is really made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.data.render import Renderer
from tandem.generation import session
from tandem.generation.runner import TwinRunner
from tandem.metrics.timing import Phase, Phases
from tandem.models.load import load_tokenizer
from tandem.models.packed import last_states, predictor_states
from tandem.ops import dense, layer
from tandem.training.make_engine import make_engine
from tandem.training.operations import batch_flops
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Message, Source, TokenBatch, TokenRow
from tests.models.families import tiny_model as tiny_llama
from tests.tiny import tiny_config
from tests.training.letter_rewards import early_letters

WIDTH, LAYERS = 32, 2


class Named(Phases):
    """Knows the phase that began last."""

    now = ""

    @contextmanager
    def __call__(self, phase: str, **counts: float) -> Iterator[Phase]:
        self.now = phase
        with super().__call__(phase, **counts) as block:
            yield block


def attention(lengths: Iterable[int], start: int = 0) -> int:
    """Token by token: products of its query with the keys it sees, and of weights with values."""
    return sum(
        LAYERS * 4 * WIDTH * (place + 1) for length in lengths for place in range(start, length)
    )


@pytest.mark.parametrize("old_logprobs", ["sampler", "forward"])
@pytest.mark.parametrize("ptx_coef", [0.0, 0.5])
def test_a_ppo_step_counts_what_it_computes(
    old_logprobs: str,
    ptx_coef: float,
    tiny_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases, made = Named(), Counter[str]()
    linear = dense.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made[phases.now] += 2 * x.numel() * weight.shape[0]
        return linear(x, weight, bias)

    ptx = {"ptx_coef": ptx_coef, "ptx_batch_size": 2}
    config = tiny_config(
        tmp_path,
        tiny_model,
        "unused",
        ppo={"prompts_per_step": 4, "minibatch_size": 8, "epochs": 1, **ptx}
        | {"old_logprobs": old_logprobs},
        sampling={"max_new_tokens": 9, "samples_per_prompt": 2},
    )
    engine = make_engine(actor=tiny_model, config=config)
    source = Source("texts", "texts", 1)
    texts = [TokenRow((5, 6, 7, 8, 9), (False, True, True, True, True), source)] * 3
    trainer = PPOTrainer(
        engine, config, reward_function=early_letters, ptx_rows=texts, phases=phases
    )
    renderer = Renderer(load_tokenizer(tiny_model))
    words = ("cat", "elephant", "yes", "nineteen")
    prompts = [renderer.prompt([Message("user", f"Say {word}.")]) for word in words]
    trainer.generate_experience(prompts, step=1)  # a twin tries a few tokens when it is new
    phases.metrics()
    monkeypatch.setattr(dense, "linear", counted)
    monkeypatch.setattr(layer, "takes", lambda x: False)  # every product is a linear layer's
    monkeypatch.setattr(session, "make_runner", lambda model, kv, _: TwinRunner(model, kv))
    with phases("step"):
        experience = trainer.generate_experience(prompts, step=1)
        trainer.train_rlhf(experience, step=1)

    lengths = experience.batch.lengths().tolist()
    run = sum(
        attention([n - 1], len(row))
        for n, row in zip(lengths, experience.rollout.prompts, strict=True)
    )
    # A prompt runs once for both of its answers.
    once = attention(map(len, prompts)) + sum(
        attention([n], len(row)) for n, row in zip(lengths, experience.rollout.prompts, strict=True)
    )
    wanted = {
        "generate": made["generate"] + attention(map(len, prompts)) + run,
        # Of the reference and the critic, and of the actor where the sampler is not believed.
        "score": made["score"] + (2 + (old_logprobs == "forward")) * once,
        # A backward is twice its forward; actor, critic, and the texts where they are mixed in.
        "train": 3 * (made["train"] + 2 * once + attention([5, 5] * (ptx_coef > 0))),
    }
    wanted["step"] = sum(wanted.values())
    said = phases.metrics()
    for phase, count in wanted.items():
        operations = said[f"tflops/{phase}"] * said[f"seconds/{phase}"] * 1e12
        # What is said also counts the norms' weights, which are no products of matrices.
        assert 0.999 * count < operations < 1.02 * count, phase


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    ("masks", "again"),
    [
        # Two turns, a prompt of four tokens for two rows and an answer of one token.
        (("...aa..aa...", "....aa", "....a"), [4]),
        # Prompts of 18, 16 and 20 tokens that begin alike, the last with two answers.
        (("." * 18 + "aa", "." * 16 + "a", "." * 20 + "aaa", "." * 20 + "a"), [16, 16, 20]),
    ],
)
def test_tokens_that_are_left_out_count_for_nothing(
    masks: tuple[str, ...], again: list[int], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    linear = dense.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        nonlocal made
        made += 2 * x.numel() * weight.shape[0]
        return linear(x, weight, bias)

    model, source = tiny_llama("llama"), Source("texts", "texts", 1)
    rows = [
        TokenRow(tuple(range(5, 5 + len(m))), tuple(c == "a" for c in m), source) for m in masks
    ]
    batch = TokenBatch.from_rows(rows, 0)
    ask = last_states if ends else predictor_states
    with torch.no_grad():
        ask(model, batch)  # a twin tries a few tokens when it is new
        monkeypatch.setattr(dense, "linear", counted)
        monkeypatch.setattr(layer, "takes", lambda x: False)  # every product is a linear layer's
        ask(model, batch)
    said = batch_flops(model, batch, ends=ends)
    lengths = [len(mask) if ends else mask.rindex("a") for mask in masks]
    said -= attention(lengths) - attention(again)
    said -= 2 * model.get_output_embeddings().weight.numel() * batch.num_response_tokens
    assert 0.999 * made < said < 1.02 * made
