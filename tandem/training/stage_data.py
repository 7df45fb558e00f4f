"""Samples rendered to token rows for every stage before any training, so that bad data is found.

Every row that is too long for its stage is entered in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from tandem.config.schema import RunConfig, rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import Stage, in_order, leaving
from tandem.data.assign import Dataset
from tandem.data.chat.own_template import OwnTemplate, put_template, read_template
from tandem.data.dataset import load_data, load_text
from tandem.data.grades import rankings_of
from tandem.data.ledger import Ledger
from tandem.data.loader import evenly, permutation
from tandem.data.progress import Progress
from tandem.data.reading.sources import read_rows
from tandem.data.render import Renderer
from tandem.data.sampled import Read
from tandem.data.spelled import note_spelled
from tandem.data.split import split_key
from tandem.data.unshown import note_unshown
from tandem.data.unwritten import note_unwritten
from tandem.garbage import collected_seldom
from tandem.models.eos import load_stop_ids
from tandem.models.load import load_tokenizer
from tandem.models.source import load_config, locate, positions_in
from tandem.training.rendering import Judged, Rendering, Row
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

Item = TypeVar("Item")
TRAINED_ON = "begins like a row that the run trains on"
"""The note on such a row of other data."""
_SHUFFLE = 2**63  # an epoch number that no training order uses
_SILENT_SECONDS = 5.0
"""Of a run's reading and rendering."""


@dataclass(frozen=True)
class StepRows:
    """The rendered rows that each stage of a run trains and evaluates on.

    sft, pairs, dpo_pairs, labelled, prompts, ptx: to train on. heldout_*: to evaluate on; no stage
    trains on them. renderer, reward_renderer: the policy's and the reward model's; `pairs` are in
    the tokens of the latter, `dpo_pairs` and `labelled` (which also has each pair as two answers)
    of the former. judges: the renderers of reward models that read the policy's answers as text, by
    templates of their own. grades: how `pairs` has graded answers: as rankings, or one by one.
    lengths: tokens of the rows for each use, also of those that are too long. spread: of the kinds
    of which `dataset.eval_rows` leaves some out, how many are evaluated on, and how many there are.
    Prompts are shuffled, so that the first few are from all data sets.
    """

    renderer: Renderer
    reward_renderer: Renderer
    judges: list[Renderer]
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase
    ledger: Ledger
    sft: list[TokenRow]
    heldout_sft: list[TokenRow]
    pairs: list[Judged]
    heldout_pairs: list[PairRow]
    heldout_graded: list[GradedRow]
    grades: Literal["pairs", "regression"]
    dpo_pairs: list[PairRow]
    heldout_dpo_pairs: list[PairRow]
    labelled: list[LabelledRow]
    heldout_labelled: list[LabelledRow]
    prompts: list[PromptRow]
    heldout_prompts: list[PromptRow]
    ptx: list[TokenRow]
    heldout_ptx: list[TokenRow]
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    spread: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, stage: Stage) -> Sequence[TokenRow | Judged | LabelledRow | PromptRow]:
        """The rows that a stage trains on."""
        if stage.labelled:
            return self.labelled
        if stage.share == "pairs":
            return self.pairs if stage.leaves == "reward model" else self.dpo_pairs
        return self.sft if stage.share == "texts" else self.prompts

    def heldout_of(
        self, stage: Stage
    ) -> Sequence[TokenRow | PairRow | GradedRow | LabelledRow | PromptRow]:
        """The rows that it is evaluated on."""
        if stage.labelled:
            return self.heldout_labelled
        if stage.share == "pairs":
            rewards = stage.leaves == "reward model"
            if not rewards:
                return self.heldout_dpo_pairs
            if self.grades == "regression":
                return self.heldout_graded or self.heldout_pairs
            return self.heldout_pairs or self.heldout_graded
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
def prepare_rows(
    config: RunConfig,
    policy: str,
    reward: str,
    *,
    says: bool = False,
    shuffle: bool = True,
    trains: bool = True,
    trained_on: Collection[bytes] = (),
    reward_is_finished: bool = False,
) -> StepRows:
    """Read the data sets and render them for the configured stages.

    Args:
        policy, reward: the models whose tokenizers policy and reward model use.
        says: on stderr, how far it is, where it takes long.
        shuffle: off leaves prompts in the order of the data sets.
        trains: off leaves out the rows that stages train on, which take most of the time.
        reward_is_finished: even if a stage trains one.
        trained_on: `split.split_key`s; held-out rows that begin so are noted.
    Raises:
        DataError: a file or row cannot be used, and the configuration makes that an error.
    """
    with Progress(after=_SILENT_SECONDS) if says else nullcontext() as progress:
        read = partial(_read, config, trains, trained_on, progress)
        return _prepared(config, policy, reward, read, progress, shuffle, reward_is_finished)


def _prepared(
    config: RunConfig,
    policy: str,
    reward: str,
    read: Callable[[], Dataset],
    progress: Progress | None,
    shuffle: bool,
    reward_is_finished: bool,
) -> StepRows:
    own, remote = read_template(config.dataset.own_template), config.trust_remote_code
    tokenizer, renderer = load_renderer(policy, trust_remote_code=remote, own=own)
    scores = bool(leaving(config.stages, "reward model"))
    is_finished = reward_is_finished or (reward != policy and not scores)
    reward_tokenizer, reward_renderer = load_renderer(
        reward, trust_remote_code=remote, own=own, unless_its_own=is_finished
    )
    data = read()  # behind the tokenizers, which are soon refused
    render, few = Rendering(config, data.ledger, progress), _Spread(config.dataset.eval_rows)
    room, reward_room = positions(policy, config), positions(reward, config)
    prompt_room = None if room is None else room - config.sampling.max_new_tokens
    stages = in_order(config.stages)
    shares = {stage.share for stage in stages}
    readers = _readers_of_pairs(stages)
    ptx = read_mixture(config, data.ledger)
    _note_lost((data, ptx), renderer, data.ledger)
    judges = _judges(config, data, renderer, reward_renderer, own)
    as_prompts = partial(render.prompts, renderer=renderer, judges=judges)
    prompts: list[PromptRow] = []
    if "prompts" in shares:
        prompts = as_prompts(data.prompts, use="prompts")
        if shuffle:
            prompts = shuffled(prompts, config.seed)
    elif "reward model" in readers:  # prompts to normalize the scores on: PPO's, or the pairs' own
        some = shuffled(data.prompts or data.pairs, config.seed)
        measured = partial(as_prompts, use=None, room=prompt_room)
        prompts = _first_that_fit(some, measured, config.reward.normalize_prompts)
    compared, heldout = rankings_of(data.pairs), rankings_of(data.heldout)
    return StepRows(
        renderer=renderer,
        reward_renderer=reward_renderer,
        judges=judges,
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        ledger=data.ledger,
        sft=render.texts(data.texts, renderer, "texts") if "texts" in shares else [],
        heldout_sft=few("texts", render.texts(data.heldout, renderer, None, room)),
        pairs=render.judged(data.pairs, reward_renderer) if "reward model" in readers else [],
        heldout_pairs=few("pairs", render.pairs(heldout, reward_renderer, None, reward_room)),
        heldout_graded=few(
            "graded answers", render.graded(data.heldout, reward_renderer, reward_room)
        ),
        grades=data.grades,
        dpo_pairs=render.pairs(compared, renderer, "pairs") if "policy" in readers else [],
        heldout_dpo_pairs=few("pairs", render.pairs(heldout, renderer, None, room))
        if "policy" in readers
        else [],
        labelled=render.labelled(compared, renderer, "pairs") if "labels" in readers else [],
        heldout_labelled=few("labelled answers", render.labelled(heldout, renderer, None, room))
        if "labels" in readers
        else [],
        prompts=prompts,
        heldout_prompts=shuffled(as_prompts(data.heldout, use=None, room=prompt_room), config.seed),
        ptx=render.texts(ptx.texts, renderer, "ptx"),
        heldout_ptx=few("mixed texts", render.texts(ptx.heldout, renderer, None, room)),
        lengths=render.lengths,
        spread=few.counts,
    )


def read_data(config: RunConfig, read: Read = read_rows) -> Dataset:
    """A run's data sets, each row for the stage that may train on it; `read` yields their rows.

    Raises:
        ConfigError, DataError: as `load_data`.
    """
    return load_data(
        config.dataset,
        config.data,
        config.sft_data,
        config.eval_data,
        seed=config.seed,
        stages=config.stages,
        grades=config.reward.grades,
        read=read,
    )


def read_mixture(config: RunConfig, ledger: Ledger) -> Dataset:
    """The texts for mixture training; empty without any, or without a stage that reads them.

    Raises:
        ConfigError, DataError: as `load_text`.
    """
    named = rl_section(config).ptx_data
    if not named or not any("ptx_data" in stage.data for stage in in_order(config.stages)):
        return Dataset()
    scores = bool(leaving(config.stages, "reward model"))
    text = load_text(named, config.dataset, seed=config.seed, scores=scores, ledger=ledger)
    return Dataset(texts=text.train, heldout=text.heldout)


def _read(
    config: RunConfig, trains: bool, trained_on: Collection[bytes], progress: Progress | None
) -> Dataset:
    data = read_data(config, progress.rows_of if progress else read_rows)
    for sample in data.heldout if trained_on else ():
        if split_key(sample, config.seed) in trained_on:
            data.ledger.datasets[sample.source.dataset].note(TRAINED_ON, sample.source)
    return data if trains else replace(data, texts=[], pairs=[], prompts=[])


def _note_lost(read: Sequence[Dataset], renderer: Renderer, ledger: Ledger) -> None:
    """Note what the policy's template and tokenizer spell, leave out or cannot write."""
    rows = [
        row for data in read for row in (*data.texts, *data.pairs, *data.prompts, *data.heldout)
    ]
    note_spelled(rows, renderer, ledger)
    note_unshown(rows, renderer, ledger)
    note_unwritten(rows, renderer, ledger)


def _readers_of_pairs(stages: Sequence[Stage]) -> set[str]:
    """What pairs are rendered for: a reward model reads them with its own tokenizer, a policy (DPO,
    KTO) with its own."""
    return {
        "labels" if stage.labelled else stage.leaves for stage in stages if stage.share == "pairs"
    }


def _judges(
    config: RunConfig,
    data: Dataset,
    renderer: Renderer,
    reward: Renderer,
    own: OwnTemplate | None,
) -> list[Renderer]:
    """The renderers of reward models that read answers as text, by templates of their own; what
    these leave out of turns and tools is noted."""
    remote = config.trust_remote_code
    further = [
        load_renderer(other.source, trust_remote_code=remote, own=own, unless_its_own=True)[1]
        for other in weighted_models(config.scoring.reward_models)
    ]
    judges = [judge for judge in (reward, *further) if not judge.renders_like(renderer)]
    for judge in judges:
        note_unshown((*data.prompts, *data.heldout), judge, data.ledger, "the reward model")
    return judges


def positions(path: str, config: RunConfig) -> int | None:
    """The most tokens of a sequence of the model; None if it has no limit."""
    return positions_in(load_config(locate(path), trust_remote_code=config.trust_remote_code))


def _dataset(row: Row) -> str:
    """The data set that a row is from."""
    return row.sequences[0].source.dataset if isinstance(row, RankedRow) else source_of(row).dataset


def source_of(row: TokenRow | PairRow | GradedRow | LabelledRow | PromptRow) -> Source:
    """Where a row is from."""
    if isinstance(row, PairRow):
        return row.chosen.source
    return row.answer.source if isinstance(row, GradedRow | LabelledRow) else row.source


class _Spread:
    """At most `most` rows (0: all), evenly over those of each data set, of which a small one keeps
    more than its share; and how many were taken by kind."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.counts: dict[str, tuple[int, int]] = {}

    def __call__(self, kind: str, rows: list[Row]) -> list[Row]:
        most = self._most
        if not 0 < most < len(rows):
            return rows
        self.counts[kind] = most, len(rows)
        sets: dict[str, list[Row]] = {}
        for row in rows:
            sets.setdefault(_dataset(row), []).append(row)
        # Half goes to all data sets alike, so that a small one is seen beside a large one.
        shares = [min(len(own), most // (2 * len(sets))) for own in sets.values()]
        rest, left = most - sum(shares), len(rows) - sum(shares)
        found: list[Row] = []
        before = 0  # rows that are beside the shares of the data sets so far
        for own, share in zip(sets.values(), shares, strict=True):
            beside = before + len(own) - share
            some = share + rest * beside // left - rest * before // left
            found += evenly(own, some)
            before = beside
        return found


def _first_that_fit(
    samples: Sequence[Sample], rendered: Callable[[Sequence[Sample]], list[PromptRow]], most: int
) -> list[PromptRow]:
    """At most so many of the samples as prompts; few more are rendered than it takes."""
    found: list[PromptRow] = []
    for begin in range(0, len(samples), max(most, 1)):
        if len(found) >= most:
            break
        found += rendered(samples[begin : begin + most])
    return found[:most]


def shuffled(rows: list[Item], seed: int) -> list[Item]:
    """The rows in an order that depends on the seed."""
    return [rows[i] for i in permutation(len(rows), seed, _SHUFFLE)] if rows else rows
