"""Samples rendered to the rows that each stage trains on and is evaluated on."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import rl_stage
from tandem.data.excerpt import excerpt
from tandem.data.grades import answer_of
from tandem.data.ledger import Ledger
from tandem.data.length import Fitted, fit, fit_answer, fit_graded, fit_pair, fit_prompt, fit_ranked
from tandem.data.progress import Progress
from tandem.data.render import Renderer
from tandem.data.side_by_side import RendersRows, side_by_side
from tandem.errors import DataError
from tandem.message import Answer, Message
from tandem.rewards.tool_schema import offered_tools, tool_names
from tandem.text import one_line
from tandem.types import (
    GradedRow,
    LabelledRow,
    PairRow,
    PromptRow,
    RankedRow,
    Sample,
    Source,
    TokenRow,
)

MEASURING = " (measuring)"
"""Behind notes on rows that are held out: a metric has no room for them."""
ANSWER_BY_ANSWER = "a row for each answer: the chat template rewrites earlier ones"
Row = TypeVar("Row", TokenRow, PairRow, RankedRow, LabelledRow, GradedRow, PromptRow)
Judged = PairRow | RankedRow | GradedRow
"""What a reward model learns from: a pair, a ranking of several answers, an answer's grade."""


def _answers(
    renderer: RendersRows, sample: Sample, answers: Sequence[Answer]
) -> tuple[TokenRow, ...]:
    """Answers to a sample's prompt, their masks on the answer alone."""
    return tuple(
        renderer.conversation(sample.prompt, answer, sample.source, True, sample.tools)
        for answer in answers
    )


def _conversation(renderer: RendersRows, sample: Sample, turns: Sequence[Message]) -> TokenRow:
    """A sample's answer to these turns, every assistant turn's mask as it is to be learned."""
    return renderer.conversation(turns, sample.chosen or "", sample.source, tools=sample.tools)


@dataclass(frozen=True)
class _Form(Generic[Row]):
    """What a sample becomes: how it is rendered, and made to fit its stage."""

    render: Callable[[Sample, RendersRows], Row | tuple[Row, ...]]
    fit: Callable[[Row], Fitted[Row]]


_ANY = "yes"
"""Some answer, before there are others."""
_Work = tuple[Sample, _Form[Any]]


def _render(work: _Work, renderer: RendersRows) -> Any:
    sample, form = work
    return form.render(sample, renderer)


class Rendering:
    """Renders samples. Those that do not fit are entered in the ledger under their use; without a
    use (held-out rows) they are only noted, since another metric may have room for them. `room` is
    the most tokens of a row that the evaluated model can take.

    Attributes:
        lengths: tokens of every row that has a use, by use, before it is made to fit.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, progress: Progress | None = None) -> None:
        self._progress = progress
        self.config = config
        self.dataset = config.dataset
        self.ledger = ledger
        self.lengths: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self._rejection = ""
        self._measured: set[tuple[Source, str]] = set()

    def texts(
        self,
        samples: Sequence[Sample],
        renderer: Renderer,
        use: str | None,
        room: int | None = None,
    ) -> list[TokenRow]:
        """Whole conversations and documents, with the loss on what `sft.loss_on` says."""

        def render(sample: Sample, renderer: RendersRows) -> TokenRow | tuple[TokenRow, ...]:
            if sample.text is not None:
                return renderer.document(sample.text, sample.source)
            if self.config.sft.loss_on != "all":
                answer = sample.chosen or ""
                return renderer.learned(sample.prompt, answer, sample.source, sample.tools)
            row = _conversation(renderer, sample, sample.prompt)
            every = row
            if not all(turn.learned for turn in sample.prompt):
                turns = [replace(turn, learned=True) for turn in sample.prompt]
                every = _conversation(renderer, sample, turns)
            masks = zip(every.response_mask[1:], row.response_mask[1:], strict=True)
            mask = [learned or not answer for answer, learned in masks]
            return replace(row, response_mask=(False, *mask))

        def shorten(row: TokenRow) -> Fitted[TokenRow]:
            return fit(row, self.dataset.max_tokens, self.dataset.on_long_row)

        form = _Form(render, shorten)
        work = [(s, form) for s in samples if s.text is not None or s.chosen is not None]
        return self._rows(work, renderer, use, room)

    def pairs(
        self,
        samples: Sequence[Sample],
        renderer: Renderer,
        use: str | None,
        room: int | None = None,
    ) -> list[PairRow]:
        """Preferred and rejected answers, with the mask on the last answer only."""
        form = self._pair()
        return self._rows([(s, form) for s in samples if s.is_pair], renderer, use, room)

    def judged(self, samples: Sequence[Sample], renderer: Renderer) -> list[Judged]:
        """Pairs, rankings whole, and single graded answers, in the samples' order; to train on."""

        def render(sample: Sample, renderer: RendersRows) -> RankedRow:
            answers = _answers(renderer, sample, [answer for _, answer in sample.ranking])
            if sample.rows:
                own = zip(answers, sample.rows, strict=True)
                answers = tuple(replace(answer, source=rows[0]) for answer, rows in own)
            ranks = tuple(rank for rank, _ in sample.ranking)
            return RankedRow(answers, ranks, grades=sample.grades)

        def shorten(row: RankedRow) -> Fitted[RankedRow]:
            fits = fit_graded if row.grades else fit_ranked
            return fits(row, self.dataset.max_tokens, self.dataset.on_long_row)

        ranking, pair, grade = _Form(render, shorten), self._pair(), self._grade()
        work: list[_Work] = []
        for sample in samples:
            if sample.grades or len(sample.ranking) > 2:
                work.append((sample, ranking))
            elif sample.is_pair:
                work.append((sample, pair))
            elif sample.grade is not None:
                work.append((sample, grade))
        return self._rows(work, renderer, "pairs", None)

    def graded(
        self, samples: Sequence[Sample], renderer: Renderer, room: int | None
    ) -> list[GradedRow]:
        """Single answers with their grades; to evaluate on."""
        form = self._grade()
        work = [(s, form) for s in samples if s.grade is not None]
        return self._rows(work, renderer, None, room)

    def labelled(
        self,
        samples: Sequence[Sample],
        renderer: Renderer,
        use: str | None,
        room: int | None = None,
    ) -> list[LabelledRow]:
        """Answers that are called good or bad, and pairs as one of each."""

        def render(sample: Sample, renderer: RendersRows) -> LabelledRow:
            answer = sample.chosen if sample.label else sample.rejected
            return LabelledRow(_answers(renderer, sample, [answer or ""])[0], bool(sample.label))

        def shorten(row: LabelledRow) -> Fitted[LabelledRow]:
            return fit_answer(row, self.dataset.max_tokens, self.dataset.on_long_row)

        label, pair = _Form(render, shorten), self._pair()
        work: list[_Work] = []
        for sample in samples:
            if sample.label is not None:
                work.append((sample, label))
            if sample.is_pair:
                work.append((sample, pair))
        found: list[LabelledRow] = []
        for row in self._rows(work, renderer, use, room):
            if isinstance(row, PairRow):
                found += [LabelledRow(row.chosen, True), LabelledRow(row.rejected, False)]
            else:
                found.append(row)
        return found

    def prompts(
        self,
        samples: Sequence[Sample],
        renderer: Renderer,
        use: str | None,
        room: int | None = None,
        judges: Sequence[Renderer] = (),
    ) -> list[PromptRow]:
        """Prompts to answer.

        Args:
            judges: of reward models with templates of their own, which read the answers as text:
                some write no calls.
        """
        samples = self._offered([s for s in samples if s.prompt], use)
        samples = self._readable(samples, judges, use)

        def render(sample: Sample, renderer: RendersRows) -> PromptRow:
            row = renderer.prompt(sample.prompt, sample.columns, sample.source, sample.tools)
            if not len(row):
                raise DataError(
                    f"{sample.source}: a prompt must have tokens; got none of "
                    f"{excerpt(sample.prompt[-1].content)}. Change the row, or use a chat template."
                )
            return row

        def shorten(row: PromptRow) -> Fitted[PromptRow]:
            return fit_prompt(
                row, self.dataset.max_prompt_tokens, self.dataset.on_long_row, renderer
            )

        form = _Form(render, shorten)
        return self._rows([(s, form) for s in samples], renderer, use, room)

    def _offered(self, samples: list[Sample], use: str | None) -> list[Sample]:
        """The samples with the tools that the run offers. Those that list some of them themselves
        keep their own words; those that list others, which nobody could call, are left out."""
        knob = f"{rl_stage(self.config.stages).section}.tools"
        offered = offered_tools(rl_section(self.config).tools, knob)
        known = set(tool_names(offered))
        found = []
        for sample in samples if known else ():
            others = [name for name in tool_names(sample.tools) if name not in known]
            if not others:
                found.append(replace(sample, tools=sample.tools or offered))
                continue
            reason = "lists a tool that is none of the run's"
            if self.dataset.on_bad_row == "error":
                raise DataError(
                    f"{sample.source}: tools must be among those of the run "
                    f"({', '.join(sorted(known))}); got {excerpt(others[0])}. Remove them from the "
                    "row, or give their functions."
                )
            self._note(sample, use, Fitted(None, "dropped", reason))
        return found if known else samples

    def _readable(
        self, samples: list[Sample], judges: Sequence[Renderer], use: str | None
    ) -> list[Sample]:
        """Those whose answers the judges can read."""

        def render(sample: Sample, renderer: RendersRows) -> Sample:
            renderer.conversation(sample.prompt, _ANY, sample.source, True, sample.tools)
            return sample

        form = _Form[Any](render, lambda sample: Fitted(sample, "kept"))
        for judge in judges:
            asked = [sample for sample in samples if _has_tools(sample)]
            read = {
                id(sample) for sample in self._rows([(s, form) for s in asked], judge, use, None)
            }
            samples = [s for s in samples if not _has_tools(s) or id(s) in read]
        return samples

    def _grade(self) -> _Form[GradedRow]:
        def render(sample: Sample, renderer: RendersRows) -> GradedRow:
            assert sample.grade is not None
            return GradedRow(_answers(renderer, sample, [answer_of(sample) or ""])[0], sample.grade)

        def shorten(row: GradedRow) -> Fitted[GradedRow]:
            return fit_answer(row, self.dataset.max_tokens, self.dataset.on_long_row)

        return _Form(render, shorten)

    def _pair(self) -> _Form[PairRow]:
        def render(sample: Sample, renderer: RendersRows) -> PairRow:
            chosen, rejected = _answers(
                renderer, sample, [sample.chosen or "", sample.rejected or ""]
            )
            return PairRow(chosen, rejected, sample.margin)

        def shorten(pair: PairRow) -> Fitted[PairRow]:
            return fit_pair(pair, self.dataset.max_tokens, self.dataset.on_long_row)

        return _Form(render, shorten)

    def _rows(
        self, work: Sequence[_Work], renderer: Renderer, use: str | None, room: int | None
    ) -> list[Any]:
        rows = []
        counted = self._counted(work, use)
        with side_by_side(renderer, work, _render) as renderers:
            for (sample, form), its_renderer in zip(counted, renderers, strict=True):
                try:
                    rendered = form.render(sample, its_renderer)
                except DataError as error:
                    # A row that tokenizer or template reject is a bad row like any other.
                    if self.dataset.on_bad_row == "error":
                        raise
                    self._note(sample, use, Fitted(None, "dropped", self._rejected(error)))
                    continue
                made = rendered if isinstance(rendered, tuple) else (rendered,)
                if use is not None and not isinstance(rendered, Sample):
                    self.lengths[use].extend(map(len, made))
                fitted = [_within(room, form.fit(row)) for row in made]
                if len(made) > 1:
                    self._remark(sample.sources, use, ANSWER_BY_ANSWER)
                kept = [each.row for each in fitted if each.row is not None]
                for each in fitted:
                    if each.row is None and kept:
                        left_out = f"one of its answers left out: {each.reason}"
                        self._remark(sample.sources, use, left_out)
                    else:
                        self._note(sample, use, each)
                rows += kept
        return rows

    def _counted(self, work: Sequence[_Work], use: str | None) -> Iterable[_Work]:
        if self._progress is None:
            return work
        self._progress.begin(f"rendering {use or 'held-out rows'}")
        return self._progress.over(work, len(work))

    def _note(self, sample: Sample, use: str | None, fitted: Fitted[Any]) -> None:
        if fitted.outcome == "kept":
            return
        sources = sample.sources
        if sample.rows and isinstance(fitted.row, RankedRow) and fitted.outcome == "dropped":
            kept = {answer.source for answer in fitted.row.sequences}
            sources = tuple(s for rows in sample.rows if rows[0] not in kept for s in rows)
        if use is None or fitted.outcome != "dropped":
            self._remark(sources, use, fitted.reason)
            return
        for source in sources:
            self.ledger.drop(source, use, fitted.reason)

    def _remark(self, sources: Sequence[Source], use: str | None, remark: str) -> None:
        """Note something of rows that are not dropped for it."""
        note = f"{remark} ({use})" if use else f"{remark}{MEASURING}"
        for source in sources:
            if use is None:  # a held-out row is measured in several ways
                if (source, note) in self._measured:
                    continue
                self._measured.add((source, note))
            self.ledger.datasets[source.dataset].note(note, source)

    def _rejected(self, error: DataError) -> str:
        """Why a row that the tokenizer or its template rejects is dropped, with what the first of
        them was told."""
        if not self._rejection:
            said = one_line(error)
            self._rejection = f"the tokenizer or its template cannot take it; the first: {said}"
        return self._rejection


def _within(room: int | None, fitted: Fitted[Any]) -> Fitted[Any]:
    if fitted.row is not None and room is not None and len(fitted.row) > room:
        return Fitted(None, "dropped", "longer than the model's positions")
    return fitted


def _has_tools(sample: Sample) -> bool:
    return bool(sample.tools) or any(t.tool_calls or t.role == "tool" for t in sample.prompt)
