"""A pretrained model against what its own program said: log-probs, greedy text, perplexity.

    python bench/golden.py MODEL_DIR TEXT.jsonl[.gz]

MODEL_DIR holds `hf/` (the model) and `golden.json` (prompts with ids, log-probs, top tokens and
greedy ids, recorded elsewhere). The perplexity is over the first texts, as its card says.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from tandem.config.schema import RunConfig, SamplingConfig
from tandem.data.reading.sources import parse_spec, read_rows
from tandem.data.render import Renderer
from tandem.data.rows import RawRow
from tandem.engine.forward import response_logprobs
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.models.eos import load_stop_ids
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.training.evaluate import language_model_metrics
from tandem.types import Message, PromptRow, Source, TokenBatch, TokenRow


def greedy_agreement(folder: Path, cases: list[dict[str, Any]]) -> tuple[int, int]:
    """How many of the cases' greedy continuations our generator repeats token by token."""
    model = load_causal_lm(folder / "hf")
    tokenizer = load_tokenizer(folder / "hf")
    equal = 0
    for i, case in enumerate(cases):
        prompt, whole = tuple(case["prompt_ids"]), list(case["greedy_ids"])
        row = PromptRow(prompt, (Message("user", ""),), {}, Source("golden", str(folder), i + 1))
        stops = Stops(
            load_stop_ids(folder / "hf"), tokenizer.pad_token_id, Renderer(tokenizer).decode
        )
        # So cold that the likeliest token always wins.
        sampling = SamplingConfig(temperature=1e-6, max_new_tokens=len(whole) - len(prompt))
        rollout = generate(model, [row], sampling, stops, seed=0, step=0)
        equal += rollout.batch.token_ids[0].tolist() == whole
    return equal, len(cases)


def logprob_difference(folder: Path, cases: list[dict[str, Any]]) -> float:
    """Largest difference of a prompt token's log-prob, nats."""
    model = load_causal_lm(folder / "hf")
    worst = 0.0
    for case in cases:
        ids = torch.tensor([case["prompt_ids"]])
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        with torch.no_grad():
            ours, _ = response_logprobs(model, TokenBatch(ids, torch.ones_like(mask), mask))
        expected = torch.tensor(case["prompt_token_logprobs"])
        worst = max(worst, float((ours[0, 1:] - expected).abs().max()))
    return worst


def text_loss(folder: Path, path: str, num_texts: int, characters: int) -> float:
    """Nats per token over the first texts, each behind one BOS and without an end."""
    model, tokenizer = load_causal_lm(folder / "hf"), load_tokenizer(folder / "hf")
    limit = model.config.max_position_embeddings
    rows = []
    for raw in read_rows(parse_spec(path)):
        assert isinstance(raw, RawRow)
        text = str(raw.columns["text"])[: characters or None]
        ids = tuple(tokenizer.encode(text)[:limit])
        rows.append(TokenRow(ids, (False, *[True] * (len(ids) - 1)), raw.source))
        if len(rows) == num_texts:
            break
    metrics = language_model_metrics(model, rows, Renderer(tokenizer), RunConfig())
    return metrics["heldout_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--num-texts", type=int, default=200)
    parser.add_argument("--characters", type=int, default=0, help="cut each text; 0 takes it whole")
    options = parser.parse_args()
    folder = Path(options.model)
    golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
    equal, cases = greedy_agreement(folder, golden["cases"])
    loss = text_loss(folder, options.text, options.num_texts, options.characters)
    print(f"{golden['model']}: log-probs differ by at most "
          f"{logprob_difference(folder, golden['cases']):.1e} nats")  # fmt: skip
    print(f"greedy text equal in {equal} of {cases} cases")
    print(f"loss {loss:.3f} nats a token, perplexity {math.exp(loss):.3f}")


if __name__ == "__main__":
    main()
