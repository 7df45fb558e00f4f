"""What a run records of its answers and rows, for people to look at (docs/page.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.data.tokenview import TokenPieces
from tandem.message import answer_text
from tandem.metrics.answers import ANSWERS_FILE, ROLLOUTS_FILE
from tandem.training.conversations import given_turns, said
from tandem.training.scored_answers import ScoredAnswers
from tandem.training.stage_data import StepRows
from tandem.types import Experience, PromptRow, Rollout, TokenRow

if TYPE_CHECKING:
    from tandem.training.stage_loop import StepLoop

_BINS = 32
_SHOWN_ROWS = 6
_SHOWN_TOKENS = 400
_PER_TOKEN = ("old_logprobs", "ref_logprobs", "values", "rewards", "returns", "advantages")
"""Tensors of an Experience that are recorded of every token."""


class AnswerKeeper:
    """Makes a stage's lines of answers.jsonl, rollouts.jsonl and followed.jsonl."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_answers: int) -> None:
        """`num_answers` of a rollout are recorded token by token."""
        self._pieces = TokenPieces(tokenizer)
        self._num_answers = num_answers
        self._evaluated: tuple[Rollout, ScoredAnswers, Tensor | None] | None = None

    def record(self, loop: StepLoop, experience: Experience) -> None:
        """Write what is kept of a step's answers."""
        loop.record(ANSWERS_FILE, lambda: [answer_numbers(experience)])
        if self._num_answers:
            loop.record(ROLLOUTS_FILE, lambda: list(self._answers(experience)))

    def follow(self, rollout: Rollout, scored: ScoredAnswers, log_ratios: Tensor | None) -> None:
        """Hear of an evaluation's answers; `followed` makes their lines."""
        self._evaluated = rollout, scored, log_ratios

    def followed(self) -> list[dict[str, Any]]:
        """A line per prompt of the last evaluation; rewards without penalties and clips."""
        if self._evaluated is None:
            return []
        rollout, scored, log_ratios = self._evaluated
        mask = rollout.batch.response_mask
        rewards = scored.mixed.masked_fill(~scored.is_scored, torch.nan)
        kls = None if log_ratios is None else (log_ratios.to(mask.device) * mask).sum(dim=1)
        rewarded = bool(scored.is_scored.any())
        return [
            {
                **_asked(rollout.prompts[row]),
                **_answered(rollout, row),
                **({"reward": _rounded(float(rewards[row]))} if rewarded else {}),
                **({} if kls is None else {"kl": _rounded(float(kls[row]))}),
            }
            for row in range(len(rollout))
        ]

    def _answers(self, experience: Experience) -> Iterator[dict[str, Any]]:
        """Some answers of a step, evenly spread over its rows."""
        rollout, total = experience.rollout, len(experience)
        shown = min(self._num_answers, total)
        kls, rewarded = _answer_kl(experience), _is_rewarded(experience)
        for row in (n * total // shown for n in range(shown)):
            mask = experience.batch.response_mask[row]
            ids = experience.batch.token_ids[row]
            first = int(mask.int().argmax())
            columns = {
                name.removeprefix("old_"): _numbers(getattr(experience, name)[row][mask], digits=4)
                for name in _PER_TOKEN
                if getattr(experience, name) is not None
            }
            yield {
                "row": row,
                "group": int(experience.group[row]),
                **_asked(rollout.prompts[row]),
                **_answered(rollout, row),
                **({"reward": _rounded(float(experience.scores[row]))} if rewarded else {}),
                **({} if kls is None else {"kl": _rounded(float(kls[row]))}),
                "tokens": self._pieces(ids[mask].tolist(), int(ids[first - 1])),
                **columns,
            }


def answer_numbers(experience: Experience) -> dict[str, Any]:
    """A step's line of answers.jsonl: every answer's numbers, and a histogram of advantages."""
    mask, kls = experience.batch.response_mask, _answer_kl(experience)
    line: dict[str, Any] = {
        **({"reward": _numbers(experience.scores)} if _is_rewarded(experience) else {}),
        "length": mask.sum(dim=1).tolist(),
        "finished": experience.rollout.finished.int().tolist(),
    }
    if kls is not None:
        line["kl"] = _numbers(kls)
    advantages = experience.advantages[mask].detach().float().cpu()
    if len(advantages) and _is_rewarded(experience) and bool(advantages.isfinite().all()):
        low, high = float(advantages.min()), float(advantages.max())
        if low == high:
            low, high = low - 0.5, high + 0.5
        counts = torch.histc(advantages, bins=_BINS, min=low, max=high)
        line["advantage"] = {
            "low": _rounded(low),
            "high": _rounded(high),
            "counts": counts.int().tolist(),
        }
    return line


def shown_rows(rows: StepRows) -> dict[str, list[dict[str, Any]]]:
    """The first rows of each kind as tokens and mask, the content of data_rows.json: `learned` has
    a 1 per token that is trained on. Long rows are cut after 400 tokens; `num_tokens` has all."""
    policy = TokenPieces(rows.tokenizer)
    scorer = policy
    if rows.reward_tokenizer is not rows.tokenizer:
        scorer = TokenPieces(rows.reward_tokenizer)
    kinds: dict[str, tuple[Sequence[Any], TokenPieces]] = {
        "texts": (rows.sft, policy),
        "pairs": (rows.pairs, scorer),
        "dpo_pairs": (rows.dpo_pairs, policy),
        "labelled": (rows.labelled, policy),
        "prompts": (rows.prompts, policy),
        "ptx": (rows.ptx, policy),
    }
    return {
        kind: [_shown_row(row, pieces) for row in some[:_SHOWN_ROWS]]
        for kind, (some, pieces) in kinds.items()
        if some
    }


def _shown_row(row: Any, pieces: TokenPieces) -> dict[str, Any]:
    if isinstance(row, PromptRow):
        row = TokenRow(row.token_ids, (False,) * len(row), row.source)
    sequences: Sequence[TokenRow] = (row,) if isinstance(row, TokenRow) else row.sequences
    source = sequences[0].source
    return {
        "dataset": source.dataset,
        "line": source.line,
        "sequences": [
            {
                "num_tokens": len(sequence),
                "tokens": pieces(sequence.token_ids[:_SHOWN_TOKENS]),
                "learned": [int(m) for m in sequence.response_mask[:_SHOWN_TOKENS]],
            }
            for sequence in sequences
        ],
    }


def _asked(prompt: PromptRow) -> dict[str, Any]:
    """The turns of the data's prompt, and a name that is the same in every step and run."""
    turns = [{"role": turn.role, "content": answer_text(turn)} for turn in given_turns(prompt)]
    text = "\x1e".join(f"{turn['role']}\x1f{turn['content']}" for turn in turns) + prompt.tools
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return {"prompt_id": digest[:12], "prompt": turns}


def _answered(rollout: Rollout, row: int) -> dict[str, Any]:
    return {
        "text": said(rollout.prompts[row], rollout.responses[row]),
        "length": int(rollout.batch.response_mask[row].sum()),
        "finished": int(rollout.finished[row]),
    }


def _answer_kl(experience: Experience) -> Tensor | None:
    """(B,) nats: log(policy / reference) summed over each answer."""
    if experience.ref_logprobs is None:
        return None
    ratios = experience.old_logprobs - experience.ref_logprobs
    return (ratios * experience.batch.response_mask).sum(dim=1)


def _is_rewarded(experience: Experience) -> bool:
    """Whether the answers have rewards; a policy that learns from a teacher has none."""
    return not bool(experience.scores.isnan().all())


def _numbers(values: Tensor, digits: int = 6) -> list[float]:
    return [_rounded(value, digits) for value in values.detach().float().cpu().tolist()]


def _rounded(value: float, digits: int = 6) -> float:
    """To significant digits: what is shown needs no more, and files stay small."""
    return float(f"{value:.{digits}g}") + 0.0  # no -0.0
