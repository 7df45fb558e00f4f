"""What a stage does in a step, on one rank: tokens, micro-batches, rows, updates.

`memory` asks how much of it is held at once, `seconds` how long it takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tandem.config.conversations import answer_tokens
from tandem.config.schema import RLConfig, RunConfig
from tandem.config.stages import Stage, leaving
from tandem.config.updates import minibatch_size, num_updates
from tandem.predict.rows import Rows

_SPREAD = 1.5
"""Three standard deviations of a row's cost, each taken to be half of what the dearest row costs
more than the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of a step of one rank, where not said otherwise.

    steps: of the stage; 0: not known. tokens, answered: that are trained (PPO: in one pass over the
    answers). sequences: of those tokens; length: their mean. updates: optimizer steps, passes over
    the same answers included. micro_batches: of all updates. micro_tokens: of the largest; later:
    of the largest that adds to an earlier one's gradients (RL: not counted). rehearsed: of the
    largest that the rehearsal before the first step tries. rows: answers sampled, at_once in
    parallel. prompt, longest_prompt, new: their tokens. longest: tokens of the longest sequence of
    a row (RL: not counted). alike: tokens that sequences begin with alike, computed once in a
    micro-batch. ptx: tokens of texts mixed in, per update.
    """

    steps: int = 0
    tokens: float
    answered: float
    sequences: float
    updates: int = 1
    passes: int = 1
    micro_batches: float
    micro_tokens: int
    later: int = 0
    rehearsed: int
    rows: float = 0.0
    prompts: float = 0.0
    at_once: int = 0
    prompt: float = 0.0
    longest_prompt: int = 0
    longest: int = 0
    new: int = 0
    alike: int = 0
    ptx: float = 0.0

    @property
    def length(self) -> float:
        """Mean tokens of a sequence, as attention counts them: half are the keys that a query sees
        of what is its sequence's own, and it sees all that sequences begin with alike."""
        return self.tokens / max(1.0, self.sequences) + 2.0 * self.alike


def work_of(
    config: RunConfig, stage: Stage, ranks: int, rows: Rows, positions: int | None = None
) -> Work:
    """A step's work, from the knobs and the data.

    Args:
        positions: of the policy, which limit its conversations; None: without limit, or not known.
    """
    section: Any = getattr(config, stage.section)
    if stage.family == "rl":
        new = answer_tokens(config, rows.longest, positions)
        return _rl_work(config, section, ranks, rows, new)
    batch = min(section.batch_size, rows.count) if rows.count else section.batch_size
    share = -(-batch // ranks)
    whole = max(1, round(rows.sequences * rows.longest))
    width, dearest = rows.widest or whole, rows.dearest or whole
    limit = config.micro_batch_tokens
    # Rows are put together by what they cost; of a prompt that they share, less is computed.
    cost = max(1.0, rows.cost or rows.tokens)
    fits = max(1, min(limit // dearest, share))
    at_once = min(share, limit / cost)
    micro = max(1.0, batch * cost / ranks / min(limit, share * dearest))
    steps = section.max_steps
    if rows.count:
        found = max(1, -(-int(rows.count * section.epochs) // batch))
        steps = min(steps, found) if steps else found
    micro = -(-micro // 1)
    # What rows begin with alike is computed once in a micro-batch.
    again = max(0.0, batch / ranks - micro) * rows.alike
    most = at_once * rows.tokens - max(0.0, at_once - 1) * rows.alike
    micro_tokens = min(limit, max(width, round(most)))
    return Work(
        steps=steps,
        tokens=batch * rows.tokens / ranks - again,
        answered=batch * rows.answered / ranks,
        sequences=batch * rows.sequences / ranks,
        micro_batches=micro,
        micro_tokens=micro_tokens,
        later=round(_later(share, cost, dearest, limit) * micro_tokens),
        rehearsed=fits * width - (fits - 1) * rows.alike,
        longest=rows.longest,
        alike=rows.alike,
    )


def _rl_work(config: RunConfig, rl: RLConfig, ranks: int, rows: Rows, new: int) -> Work:
    """`new`: most tokens that follow a prompt."""
    samples = config.sampling.samples_per_prompt
    answers = rl.prompts_per_step * samples
    mine = -(-answers // ranks)
    share = -(-min(minibatch_size(config), answers) // ranks)
    length = rows.longest + new
    limit = config.micro_batch_tokens
    # Answers to a prompt compute it once, a micro-batch what prompts begin with alike.
    each = (rows.tokens - rows.alike) / samples + new
    updates = num_updates(config, 1)
    micro = updates * max(1.0, -(-share * each // max(1, limit - rows.alike)))
    steps = rl.steps or (-(-rows.count // rl.prompts_per_step) if rows.count else 0)
    return Work(
        steps=steps,
        tokens=mine * each + min(micro / rl.epochs, mine / samples) * rows.alike,
        answered=mine * new,
        sequences=mine,
        updates=updates,
        passes=rl.epochs,
        micro_batches=micro,
        micro_tokens=min(
            limit, max(length, round(share * (rows.tokens - rows.alike + new) + rows.alike))
        ),
        rehearsed=max(1, min(limit // length, share)) * length,
        rows=mine,
        prompts=mine / samples,
        at_once=min(config.generation_batch_size, mine),
        prompt=rows.tokens,
        longest_prompt=rows.longest,
        new=new,
        alike=rows.alike,
        ptx=rl.ptx_batch_size * rows.ptx / ranks if rl.ptx_data else 0.0,
    )


def _later(rows: int, cost: float, dearest: float, limit: int) -> float:
    """The most that an update's second micro-batch holds, as a share of the first, which is filled
    to the limit. Rows cost `cost` on the average and `dearest` at most, so updates differ."""
    varies = _SPREAD * math.sqrt(rows) * max(0.0, dearest - cost)
    whole = min(rows * cost + varies, rows * max(cost, dearest))
    return min(1.0, max(0.0, whole / limit - 1.0))


def num_reward_models(config: RunConfig, stage: Stage) -> int:
    """How many reward models score, as far as the configuration says: none where a function alone
    is named. One that an earlier run left in the folder is not seen here."""
    rl: RLConfig = getattr(config, stage.section)
    named = bool(config.reward_model) or bool(leaving(config.stages, "reward model"))
    weighs = stage.rewarded and rl.reward_model_weight > 0
    scores = weighs and (named or not rl.reward_function)
    return 1 + len(config.scoring.reward_models) if scores else 0
