"""A baseline for reward models: logistic regression on differences of word counts.

    python bench/bag_of_words.py prefs.jsonl [more.jsonl] [--data-split 2,4,4] [--seed 1234]

It sees the same split as `tandem train` with the same data, seed and shares: it learns from step
2's pairs and is measured on the held-out ones. A reward model that does not beat it has learned
words, not answers.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.config.dataset import DataConfig
from tandem.data.dataset import load_data
from tandem.message import answer_text
from tandem.types import Sample

WORD = re.compile(r"\w+|[^\w\s]")
MIN_COUNT = 3


def words(text: str) -> Counter[str]:
    """Lower-cased words and punctuation marks, counted, with the answer's length beside them."""
    found = Counter(WORD.findall(text.lower()))
    found["<words>"] = found.total()
    return found


def differences(samples: Sequence[Sample], vocabulary: dict[str, int]) -> Tensor:
    """(pairs, words): counts in the chosen answer less those in the rejected one."""
    rows = torch.zeros(len(samples), len(vocabulary))
    for i, sample in enumerate(samples):
        for sign, answer in ((1, sample.chosen or ""), (-1, sample.rejected or "")):
            for word, count in words(answer_text(answer)).items():
                if word in vocabulary:
                    rows[i, vocabulary[word]] += sign * count
    return rows


def fit(rows: Tensor, penalty: float) -> Tensor:
    """Weights that minimize the mean of -log sigmoid(rows @ w) + penalty * |w|^2."""
    weights = torch.zeros(rows.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -torch.nn.functional.logsigmoid(rows @ weights).mean()
        loss = loss + penalty * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def accuracy(rows: Tensor, weights: Tensor) -> float:
    """Share of pairs whose chosen answer scores higher; a tie counts half."""
    margins = rows @ weights
    return float(((margins > 0).float() + 0.5 * (margins == 0).float()).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="+")
    parser.add_argument("--data-split", default="2,4,4")
    parser.add_argument("--heldout", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    shares = tuple(float(share) for share in options.data_split.split(","))
    config = DataConfig(split=shares, heldout=options.heldout, on_bad_row="drop")
    dataset = load_data(config, options.data, seed=options.seed)
    heldout = [s for s in dataset.heldout if s.chosen is not None and s.rejected is not None]
    counts: Counter[str] = Counter()
    for sample in dataset.pairs:
        counts.update(words(f"{sample.chosen} {sample.rejected}"))
    frequent = [word for word, count in counts.items() if count >= MIN_COUNT]
    vocabulary = {word: i for i, word in enumerate(frequent)}
    train = differences(dataset.pairs, vocabulary)
    scale = train.std(dim=0).clamp(min=1e-3)
    # The penalty is chosen on a fifth of the training pairs, never on the held-out ones.
    cut = len(train) * 4 // 5
    inner, check = train[:cut] / scale, train[cut:] / scale
    penalties = [10.0**power for power in range(-5, 1)]
    best = max(penalties, key=lambda penalty: accuracy(check, fit(inner, penalty)))
    weights = fit(train / scale, best)
    test = differences(heldout, vocabulary) / scale
    print(
        f"bag of words: accuracy {accuracy(test, weights):.3f} on {len(heldout)} held-out pairs "
        f"({len(train)} training pairs, {len(vocabulary)} words, penalty {best:g})"
    )


if __name__ == "__main__":
    main()
