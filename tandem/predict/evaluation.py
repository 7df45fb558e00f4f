"""How long evaluations take, and the comparison of a run's models at its end.

Both are forwards over held-out rows and answers to held-out prompts, of the kinds of work that a
step has, so their terms and coefficients are those of its phases (`seconds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.config.conversations import answer_tokens
from tandem.config.critic_free_rules import EXACT_KL
from tandem.config.schema import RLConfig, RunConfig, rl_section
from tandem.config.stages import in_order, leaving, of_family
from tandem.memory.dimensions import Shape
from tandem.memory.model import FLOAT, Layout
from tandem.memory.work import logits_rows
from tandem.predict.memory import StageCase
from tandem.predict.rows import Heldout, Rows
from tandem.predict.seconds import Pace, PhaseWork, generating, loading, scoring
from tandem.predict.work import Work, num_reward_models
from tandem.text import counted

_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Of a stage. count: before the first step, every `eval_every` steps and after the last one; 0
    where the number of steps is not known. each: seconds. once: seconds that the reference takes
    for the rows, before the first. reads: what one reads, in words. terms: ideal seconds of one,
    for fitting; none where answers are drawn, whose coefficients are those of a step's."""

    count: int
    each: float
    once: float = 0.0
    reads: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.count * self.each + self.once


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of a run's models at its end. models: policies. reads: what each reads, in words."""

    models: int
    seconds: float
    reads: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """What evaluations of a stage are predicted from. known: coefficients by phase."""

    case: StageCase
    heldout: Heldout
    pace: Pace
    known: Mapping[str, Mapping[str, float]]

    def of_stage(self) -> Evaluations:
        """All of the stage."""
        stage, models, found = self.case.stage, self.case.models, self.heldout
        section: Any = getattr(self.case.config, stage.section)
        count = num_evaluations(self.case.work.steps, section.eval_every)
        compared = models.reference or models.policy
        if stage.family == "rl":
            return self._of_answers(section, count)
        policy, once = models.policy, 0.0
        if stage.share == "texts":
            texts = self._few(found.texts)
            works, reads = self._reading(policy, texts), _said(texts, "text")
        elif stage.leaves == "reward model":
            pairs, graded = self._few(found.pairs, _PAIR), self._few(found.graded)
            reads = _joined([_said(pairs, "pair", _PAIR), _said(graded, "graded answer")])
            works = [w for rows in (pairs, graded) for w in self._reading(models.value, rows)]
        elif stage.labelled:
            rows = self._few(found.labelled)
            mismatched = replace(rows, tokens=rows.cost)  # for the baseline: no prompt is shared
            works = self._reading(policy, rows) + self._reading(policy, mismatched)
            once = self._forward(compared, rows) + self._forward(compared, mismatched)
            reads = _said(rows, "answer")
        else:
            rows = self._few(found.pairs, _PAIR)
            works, reads = self._reading(policy, rows), _said(rows, "pair", _PAIR)
            once = self._forward(compared, rows)
        return Evaluations(
            count=count,
            each=self._seconds(works),
            once=once * self.case.has_reference,
            reads=reads,
            terms=sum(works[1:], works[0]).terms if works else {},
        )

    def _of_answers(self, rl: RLConfig, count: int) -> Evaluations:
        config, models = self.case.config, self.case.models
        samples = config.sampling.samples_per_prompt
        judges = num_reward_models(config, self.case.stage)
        work = self._answering(rl.eval_prompts, samples)
        each = self._answered(work, judges) * (2 if rl.ema else 1)
        if self.case.has_reference and work is not None:
            passes = 2 if getattr(rl, "kl", "") in EXACT_KL else 1  # the exact KL has its own
            for shape in (models.policy, models.reference or models.policy):
                each += passes * self._scored(shape, _frozen(self.case.policy), work)
        mixed = self._few(self.heldout.ptx) if rl.ptx_data else Rows()
        prompts = min(self.heldout.prompts.count, rl.eval_prompts)
        reads = [_count(prompts, "prompt"), _said(mixed, "mixed text")]
        return Evaluations(count=count, each=each + self._policy(mixed), reads=_joined(reads))

    def comparison(self) -> Comparison:
        """Every policy, and the reward model, of the run's own stages."""
        config, shape = self.case.config, self.case.models.policy
        rl = rl_section(config)
        stages = of_family(config.stages, "rl")
        judges = num_reward_models(config, stages[-1]) if stages else 0
        trains_judge = bool(leaving(config.stages, "reward model"))
        judges = judges or int(not stages and trains_judge)
        texts, pairs = self._few(self.heldout.texts), self._few(self.heldout.pairs, _PAIR)
        graded = self._few(self.heldout.graded)
        policies = num_policies(config)
        each = self._loaded(shape) + self._policy(texts)
        each += self._answered(self._answering(rl.eval_prompts, 1), judges)
        seconds = policies * each
        if judges:
            seconds += judges * self._loaded(self.case.models.value)
            seconds += self._judge(pairs) + self._judge(graded)
        reads = [_said(texts, "text"), _count(min(self.heldout.prompts.count, rl.eval_prompts),
                                              "prompt")]  # fmt: skip
        return Comparison(models=policies, seconds=seconds, reads=_joined(reads))

    def _loaded(self, shape: Shape) -> float:
        """Seconds of reading a model, which is not tried out."""
        return loading([shape], self.pace).seconds(self.known["load"])

    def _few(self, rows: Rows, sequences: int = 1) -> Rows:
        """As many of a kind as an evaluation reads."""
        most = self.case.config.dataset.eval_rows * sequences
        return replace(rows, count=min(rows.count, most)) if most else rows

    def _policy(self, rows: Rows) -> float:
        return self._forward(self.case.models.policy, rows)

    def _judge(self, rows: Rows) -> float:
        return self._forward(self.case.models.value, rows)

    def _forward(self, shape: Shape, rows: Rows) -> float:
        """Seconds of a model's forward over rows."""
        return self._seconds(self._reading(shape, rows))

    def _reading(self, shape: Shape, rows: Rows) -> list[PhaseWork]:
        """A model's forward over rows, if there are any."""
        if not rows.count:
            return []
        layout = self.case.value if shape.is_scalar else self.case.policy
        mine = -(-rows.count // self.case.ranks)
        batches = -(-mine * rows.tokens // self.case.config.micro_batch_tokens)
        tokens = mine * rows.tokens - max(0.0, mine - batches) * rows.alike
        work = Work(
            tokens=tokens, answered=mine * rows.answered, sequences=mine, micro_batches=batches,
            micro_tokens=0, rehearsed=0, alike=rows.alike,
        )  # fmt: skip
        return [scoring(shape, _frozen(layout), work, self.pace)]

    def _scored(self, shape: Shape, layout: Layout, work: Work) -> float:
        return self._seconds([scoring(shape, layout, work, self.pace)])

    def _seconds(self, works: Sequence[PhaseWork]) -> float:
        known = self.known.get("evaluate") or self.known["score"]
        return sum(work.seconds(known) for work in works)

    def _answering(self, most: int, samples: int) -> Work | None:
        """The answers to at most `most` held-out prompts; None where there are none."""
        rows, config = self.heldout.prompts, self.case.config
        prompts = min(rows.count, most)
        if not prompts:
            return None
        new = answer_tokens(config, rows.longest, self.case.models.positions)
        mine = -(-prompts * samples // self.case.ranks)
        each = (rows.tokens - rows.alike) / samples + new
        tokens = mine * each
        return Work(
            tokens=tokens, answered=mine * new, sequences=mine,
            micro_batches=-(-tokens // config.micro_batch_tokens), micro_tokens=0, rehearsed=0,
            rows=mine, prompts=mine / samples, at_once=min(config.generation_batch_size, mine),
            prompt=rows.tokens, longest_prompt=rows.longest, new=new, alike=rows.alike,
        )  # fmt: skip

    def _answered(self, work: Work | None, judges: int) -> float:
        """Seconds of answers and of the scores of `judges` reward models."""
        if work is None:
            return 0.0
        policy, layout = self.case.models.policy, self.case.policy
        at_once = min(work.at_once, logits_rows(policy, layout, FLOAT))
        found = generating(
            policy, layout, work, self.pace, at_once, packs=self.case.decodes_packed
        ).seconds(self.known["generate"])
        return found + judges * self._scored(self.case.models.value, _frozen(self.case.value), work)


def num_evaluations(steps: int, every: int) -> int:
    """Before the first of `steps` steps, after each `every` of them, and after the last; 0 where
    `steps` is 0, not known."""
    if not steps:
        return 0
    after = -(-steps // every) if every else 1
    return 1 + after


def num_policies(config: RunConfig) -> int:
    """What a comparison finds: the base and what the run's own stages leave, averages included."""
    found = int(bool(config.actor_model))
    for stage in in_order(config.stages):
        section = getattr(config, stage.section)
        averages = isinstance(section, RLConfig) and section.ema
        found += min(len(stage.policies), 1 + averages)
    return found


def _frozen(layout: Layout) -> Layout:
    return replace(layout, is_trained=False)


def _said(rows: Rows, noun: str, sequences: int = 1) -> str:
    return _count(rows.count // sequences, noun)


def _count(number: int, noun: str) -> str:
    return counted(number, noun) if number else ""


def _joined(parts: Sequence[str]) -> str:
    return ", ".join(filter(None, parts))
