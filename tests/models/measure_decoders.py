"""What docs/models.md says of each decoder, measured: `python -m tests.models.measure_decoders`.

Prints one line a configuration of `decoders`, in float32 on a CPU; names as arguments choose some.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel

from tandem.engine.forward import response_logprobs
from tandem.models.load import new_causal_lm
from tandem.models.twin import decodes, why_unpacked
from tandem.types import TokenBatch
from tests.generation.test_exactness import STOP, answer, by_row, prompts

from .decoders import DECODERS, decoder_config
from .families import perturbed, ragged_batch

_LENGTHS = (19, 5, 33, 2)
_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Measured:
    """How a configuration runs.

    packs: on Tandem's engine, over packed rows. logprobs: largest error against the family's own
    forward, one row at a time, relative to the largest. gradients: norm of their difference over
    their norm. greedy: answers are those of its own `generate`. sampled: largest difference, in
    nats, of sampled log-probs and the training forward's.
    """

    packs: bool
    logprobs: float
    gradients: float
    greedy: bool
    sampled: float
    why: str

    @property
    def kind(self) -> str:
        """The row of the table that it belongs to."""
        if not self.packs:
            return "padded"
        return "exact" if self.sampled == 0.0 else "packed"


def tiny_decoder(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of one of `DECODERS`."""
    return perturbed(new_causal_lm(decoder_config(name, **changes), seed=3)).eval()


def measure(model: PreTrainedModel) -> Measured:
    """All that docs/models.md says of a model."""
    batch = ragged_batch(_LENGTHS)
    ours, _ = response_logprobs(model, batch)
    mine = ours[batch.response_mask]
    own = torch.cat(list(_own_logprobs(model, batch)))
    weights = torch.randn(len(own), generator=torch.Generator().manual_seed(1))
    gradients = [_gradient(model, values, weights) for values in (mine, own)]
    apart = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    made = answer(model, prompts(5, 17, 16, 1, 30), samples_per_prompt=2, batch_size=4)
    scored, _ = response_logprobs(model, made.batch)
    return Measured(
        packs=decodes(model),
        logprobs=float(((mine - own).abs().max() / own.abs().max()).detach()),
        gradients=apart,
        greedy=_is_greedy(model),
        sampled=float((made.rollout_logprobs - scored.detach()).abs().max()),
        why=why_unpacked(model),
    )


def _own_logprobs(model: PreTrainedModel, batch: TokenBatch) -> Iterator[Tensor]:
    for row, n in zip(batch.token_ids, batch.lengths().tolist(), strict=True):
        logits = model(input_ids=row[None, :n], use_cache=False).logits[0, :-1]
        yield torch.log_softmax(logits.float(), -1).gather(1, row[1:n, None])[:, 0]


def _gradient(model: PreTrainedModel, values: Tensor, weights: Tensor) -> Tensor:
    """All gradients of a weighted sum, as one vector; zeros where there are none."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    found = torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True)
    parts = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
    return torch.cat([part.flatten().double() for part in parts])


def _is_greedy(model: PreTrainedModel) -> bool:
    rows = prompts(5, 17, 16, 1)
    ours = answer(model, rows, top_k=1)
    settings = GenerationConfig(
        max_new_tokens=_TOKENS, do_sample=False, eos_token_id=STOP, pad_token_id=0
    )
    return all(
        ids
        == model.generate(torch.tensor([row.token_ids]), generation_config=settings)[
            0, len(row) :
        ].tolist()
        for row, (ids, _) in zip(rows, by_row(ours), strict=True)
    )


def main(names: list[str]) -> None:
    """Print a table, and the worst errors of each kind."""
    found = {}
    for name in names or (one for one in DECODERS if one.split()[0] in CONFIG_MAPPING):
        found[name] = one = measure(tiny_decoder(name))
        print(
            f"{name:24} {one.kind:6} log-probs {one.logprobs:.1e}  gradients {one.gradients:.1e}  "
            f"greedy {'same' if one.greedy else 'OTHER'}  sampled {one.sampled:.1e}  {one.why}",
            flush=True,
        )
    for kind in ("exact", "packed", "padded"):
        ones = [one for one in found.values() if one.kind == kind]
        if ones:
            print(
                f"{len(ones)} {kind}: log-probs {max(one.logprobs for one in ones):.1e}, gradients "
                f"{max(one.gradients for one in ones):.1e}, sampled "
                f"{max(one.sampled for one in ones):.1e}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
