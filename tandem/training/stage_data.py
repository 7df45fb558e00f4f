"""Samples rendered to token rows for every stage before any training, so that bad data is found.

Every row that is too long for its stage is entered in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import Stage, in_order, leaving
from tandem.data.dataset import Dataset, load_data, load_text
from tandem.data.ledger import Ledger
from tandem.data.length import Fitted, fit, fit_labelled, fit_pair, fit_prompt, fit_ranked
from tandem.data.loader import permutation
from tandem.data.own_template import OwnTemplate, put_template, read_template
from tandem.data.render import Renderer
from tandem.data.side_by_side import RendersRows, side_by_side
from tandem.data.spelled import note_spelled
from tandem.data.unshown import note_unshown
from tandem.errors import DataError
from tandem.garbage import collected_seldom
from tandem.models.eos import load_stop_ids
from tandem.models.load import load_tokenizer
from tandem.models.source import load_config, locate, positions_in
from tandem.types import LabelledRow, PairRow, PromptRow, RankedRow, Sample, TokenRow

Row = TypeVar("Row", TokenRow, PairRow, RankedRow, LabelledRow, PromptRow)
Comparison = PairRow | RankedRow
"""What a reward model learns from: a pair, or a ranking of several answers."""

_SHUFFLE = 2**63  # an epoch number that no training order uses


@dataclass(frozen=True)
class StepRows:
    """The rendered rows that each stage of a run trains and evaluates on.

    sft, pairs, dpo_pairs, labelled, prompts, ptx: to train on. heldout_*: to evaluate on; no stage
    trains on them. renderer, reward_renderer: the policy's and the reward model's; `pairs` are in
    the tokens of the latter, `dpo_pairs` and `labelled` (which also has each pair as two answers)
    of the former. Prompts are shuffled, so that the first few are from all data sets.
    """

    renderer: Renderer
    reward_renderer: Renderer
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase
    ledger: Ledger
    sft: list[TokenRow]
    heldout_sft: list[TokenRow]
    pairs: list[Comparison]
    heldout_pairs: list[PairRow]
    dpo_pairs: list[PairRow]
    heldout_dpo_pairs: list[PairRow]
    labelled: list[LabelledRow]
    heldout_labelled: list[LabelledRow]
    prompts: list[PromptRow]
    heldout_prompts: list[PromptRow]
    ptx: list[TokenRow]
    heldout_ptx: list[TokenRow]

    def of(self, stage: Stage) -> Sequence[TokenRow | Comparison | LabelledRow | PromptRow]:
        """The rows that a stage trains on."""
        if stage.labelled:
            return self.labelled
        if stage.share == "pairs":
            return self.pairs if stage.leaves == "reward model" else self.dpo_pairs
        return self.sft if stage.share == "texts" else self.prompts

    def heldout_of(self, stage: Stage) -> Sequence[TokenRow | PairRow | LabelledRow | PromptRow]:
        """The rows that it is evaluated on."""
        if stage.labelled:
            return self.heldout_labelled
        if stage.share == "pairs":
            rewards = stage.leaves == "reward model"
            return self.heldout_pairs if rewards else self.heldout_dpo_pairs
        return self.heldout_sft if stage.share == "texts" else self.heldout_prompts


def load_renderer(
    source: str,
    *,
    trust_remote_code: bool,
    own: OwnTemplate | None = None,
    unless_its_own: bool = False,
) -> tuple[PreTrainedTokenizerBase, Renderer]:
    """A model's tokenizer, and a renderer with the model's own EOS tokens.

    Args:
        own: the template to give the tokenizer; with `unless_its_own` only if it has none.
    """
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    own = put_template(tokenizer, own, unless_its_own=unless_its_own)
    return tokenizer, Renderer(tokenizer, load_stop_ids(source), own)


@collected_seldom()
def prepare_rows(config: RunConfig, policy: str, reward: str, *, shuffle: bool = True) -> StepRows:
    """Read the data sets and render them for the configured stages.

    Args:
        policy, reward: the models whose tokenizers policy and reward model use.
        shuffle: off leaves prompts in the order of the data sets.
    Raises:
        DataError: a file or row cannot be used, and the configuration makes that an error.
    """
    own, remote = read_template(config.dataset.own_template), config.trust_remote_code
    tokenizer, renderer = load_renderer(policy, trust_remote_code=remote, own=own)
    is_finished = reward != policy and not leaving(config.stages, "reward model")
    reward_tokenizer, reward_renderer = load_renderer(
        reward, trust_remote_code=remote, own=own, unless_its_own=is_finished
    )
    data = load_data(
        config.dataset,
        config.data,
        config.sft_data,
        config.eval_data,
        seed=config.seed,
        stages=config.stages,
    )
    render = _Rendering(config, data.ledger)
    room, reward_room = positions(policy, config), positions(reward, config)
    prompt_room = None if room is None else room - config.sampling.max_new_tokens
    stages = in_order(config.stages)
    shares = {stage.share for stage in stages}
    # A reward model reads pairs with its own tokenizer, a policy (DPO, KTO) with its own.
    readers = {
        "labels" if stage.labelled else stage.leaves for stage in stages if stage.share == "pairs"
    }
    ptx, ptx_data = Dataset(), rl_section(config).ptx_data
    if any("ptx_data" in stage.data for stage in stages) and ptx_data:
        text = load_text(ptx_data, config.dataset, seed=config.seed, ledger=data.ledger)
        ptx = Dataset(texts=text.train, heldout=text.heldout)
    rows = (*data.texts, *data.pairs, *data.prompts, *data.heldout, *ptx.texts, *ptx.heldout)
    note_spelled(rows, renderer, data.ledger)
    note_unshown(rows, renderer, data.ledger)
    prompts: list[PromptRow] = []
    if "prompts" in shares:
        prompts = render.prompts(data.prompts, renderer, "prompts")
    elif "reward model" in readers:  # prompts to normalize the scores on: PPO's, or the pairs' own
        prompts = render.prompts(data.prompts or data.pairs, renderer, None, prompt_room)
    return StepRows(
        renderer=renderer,
        reward_renderer=reward_renderer,
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        ledger=data.ledger,
        sft=render.texts(data.texts, renderer, "texts") if "texts" in shares else [],
        heldout_sft=render.texts(data.heldout, renderer, None, room),
        pairs=render.comparisons(data.pairs, reward_renderer) if "reward model" in readers else [],
        heldout_pairs=render.pairs(data.heldout, reward_renderer, None, reward_room),
        dpo_pairs=render.pairs(data.pairs, renderer, "pairs") if "policy" in readers else [],
        heldout_dpo_pairs=render.pairs(data.heldout, renderer, None, room)
        if "policy" in readers
        else [],
        labelled=render.labelled(data.pairs, renderer, "pairs") if "labels" in readers else [],
        heldout_labelled=render.labelled(data.heldout, renderer, None, room)
        if "labels" in readers
        else [],
        prompts=shuffled(prompts, config.seed) if shuffle else prompts,
        heldout_prompts=shuffled(
            render.prompts(data.heldout, renderer, None, prompt_room), config.seed
        ),
        ptx=render.texts(ptx.texts, renderer, "ptx"),
        heldout_ptx=render.texts(ptx.heldout, renderer, None, room),
    )


def positions(path: str, config: RunConfig) -> int | None:
    """The most tokens of a sequence of the model; None if it has no limit."""
    return positions_in(load_config(locate(path), trust_remote_code=config.trust_remote_code))


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    """The rows in an order that depends on the seed."""
    return [rows[i] for i in permutation(len(rows), seed, _SHUFFLE)] if rows else rows


def _answers(renderer: RendersRows, sample: Sample, answers: Sequence[str]) -> tuple[TokenRow, ...]:
    """Answers to a sample's prompt, their masks on the answer alone."""
    return tuple(
        renderer.conversation(sample.prompt, answer, sample.source, True) for answer in answers
    )


@dataclass(frozen=True)
class _Form(Generic[Row]):
    """What a sample becomes: how it is rendered, and made to fit its stage."""

    render: Callable[[Sample, RendersRows], Row]
    fit: Callable[[Row], Fitted[Row]]


_Work = tuple[Sample, _Form[Any]]


def _render(work: _Work, renderer: RendersRows) -> Any:
    sample, form = work
    return form.render(sample, renderer)


class _Rendering:
    """Renders samples. Those that do not fit are entered in the ledger under their use; without a
    use (held-out rows) they are only noted, since another metric may have room for them. `room` is
    the most tokens of a row that the evaluated model can take."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self.config = config
        self.dataset = config.dataset
        self.ledger = ledger

    def texts(
        self,
        samples: Sequence[Sample],
        renderer: Renderer,
        use: str | None,
        room: int | None = None,
    ) -> list[TokenRow]:
        """Whole conversations and documents, with the loss on what `sft.loss_on` says."""

        def render(sample: Sample, renderer: RendersRows) -> TokenRow:
            if sample.text is not None:
                return renderer.document(sample.text, sample.source)
            row = renderer.conversation(sample.prompt, sample.chosen or "", sample.source)
            if self.config.sft.loss_on != "all":
                return row
            every = row
            if not all(turn.learned for turn in sample.prompt):
                turns = [replace(turn, learned=True) for turn in sample.prompt]
                every = renderer.conversation(turns, sample.chosen or "", sample.source)
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
        return self._rows([(s, form) for s in samples if _is_pair(s)], renderer, use, room)

    def comparisons(self, samples: Sequence[Sample], renderer: Renderer) -> list[Comparison]:
        """Pairs, and rankings whole, in the samples' order; to train on."""

        def render(sample: Sample, renderer: RendersRows) -> RankedRow:
            answers = _answers(renderer, sample, [answer for _, answer in sample.ranking])
            return RankedRow(answers, tuple(rank for rank, _ in sample.ranking))

        def shorten(row: RankedRow) -> Fitted[RankedRow]:
            return fit_ranked(row, self.dataset.max_tokens, self.dataset.on_long_row)

        ranking, pair = _Form(render, shorten), self._pair()
        work: list[_Work] = []
        for sample in samples:
            if len(sample.ranking) > 2:
                work.append((sample, ranking))
            elif _is_pair(sample):
                work.append((sample, pair))
        return self._rows(work, renderer, "pairs", None)

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
            return fit_labelled(row, self.dataset.max_tokens, self.dataset.on_long_row)

        label, pair = _Form(render, shorten), self._pair()
        work: list[_Work] = []
        for sample in samples:
            if sample.label is not None:
                work.append((sample, label))
            if _is_pair(sample):
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
    ) -> list[PromptRow]:
        """Prompts to answer."""

        def render(sample: Sample, renderer: RendersRows) -> PromptRow:
            return renderer.prompt(sample.prompt, sample.columns, sample.source)

        def shorten(row: PromptRow) -> Fitted[PromptRow]:
            return fit_prompt(
                row, self.dataset.max_prompt_tokens, self.dataset.on_long_row, renderer
            )

        form = _Form(render, shorten)
        return self._rows([(s, form) for s in samples if s.prompt], renderer, use, room)

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
        with side_by_side(renderer, work, _render) as renderers:
            for (sample, form), its_renderer in zip(work, renderers, strict=True):
                fitted: Fitted[Any]
                try:
                    rendered = form.render(sample, its_renderer)
                except DataError:
                    # A row that tokenizer or template reject is a bad row like any other.
                    if self.dataset.on_bad_row == "error":
                        raise
                    reason = "the tokenizer or its template cannot take it"
                    fitted = Fitted(None, "dropped", reason)
                else:
                    fitted = form.fit(rendered)
                    if fitted.row is not None and room is not None and len(fitted.row) > room:
                        fitted = Fitted(None, "dropped", "longer than the model's positions")
                self._note(sample, use, fitted)
                if fitted.row is not None:
                    rows.append(fitted.row)
        return rows

    def _note(self, sample: Sample, use: str | None, fitted: Fitted[Any]) -> None:
        if fitted.outcome == "kept":
            return
        if use is not None and fitted.outcome == "dropped":
            self.ledger.drop(sample.source, use, fitted.reason)
        else:
            note = f"{fitted.reason} ({use or 'measuring'})"
            self.ledger.datasets[sample.source.dataset].notes[note] += 1


def _is_pair(sample: Sample) -> bool:
    return sample.chosen is not None and sample.rejected is not None
