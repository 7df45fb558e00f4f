"""Samples made into token rows for every step, before any training: bad data is found at once.

Every row that does not fit its step's length is entered in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.schema import RunConfig
from tandem.data.dataset import Dataset, load_data, load_text
from tandem.data.ledger import Ledger
from tandem.data.length import Fitted, fit, fit_pair, fit_prompt
from tandem.data.render import Renderer
from tandem.models.load import load_tokenizer
from tandem.models.stops import load_stop_ids
from tandem.types import PairRow, PromptRow, Sample, TokenRow


@dataclass(frozen=True)
class StepRows:
    """What each step of a run trains and measures on, rendered.

    sft, pairs, prompts, ptx: to train on. heldout_*: to measure on; no step trains on them.
    renderer: the policy's. reward_renderer: the reward model's, whose tokens `pairs` are in;
    DPO's pairs are in the policy's.
    """

    renderer: Renderer
    reward_renderer: Renderer
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase
    ledger: Ledger
    sft: list[TokenRow]
    heldout_sft: list[TokenRow]
    pairs: list[PairRow]
    heldout_pairs: list[PairRow]
    prompts: list[PromptRow]
    heldout_prompts: list[PromptRow]
    ptx: list[TokenRow]
    heldout_ptx: list[TokenRow]


def load_renderer(
    source: str, *, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, Renderer]:
    """A model's tokenizer, and the renderer that stops where the model's own settings say."""
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    return tokenizer, Renderer(tokenizer, load_stop_ids(source))


def prepare_rows(config: RunConfig, policy: str, reward: str) -> StepRows:
    """Read the data sets and render them for the configured steps.

    Args:
        policy, reward: where the policy's and the reward model's tokenizers are.
    Raises:
        DataError: a file or row cannot be used, and the configuration says to stop then.
    """
    tokenizer, renderer = load_renderer(policy, trust_remote_code=config.trust_remote_code)
    reward_tokenizer, reward_renderer = load_renderer(
        reward, trust_remote_code=config.trust_remote_code
    )
    data = load_data(config.dataset, config.data, config.sft_data, seed=config.seed)
    render = _Rendering(config, data.ledger)
    pair_renderer = renderer if "dpo" in config.steps else reward_renderer
    steps = set(config.steps)
    ptx = Dataset()
    if "ppo" in steps and config.ppo.ptx_data:
        text = load_text(config.ppo.ptx_data, config.dataset, seed=config.seed, ledger=data.ledger)
        ptx = Dataset(sft=text.train, heldout=text.heldout)
    wants_pairs = steps & {"reward", "dpo"}
    # Step 2 needs some of step 3's prompts too, to normalize its scores on.
    wants_prompts = steps & {"reward", "ppo"}
    return StepRows(
        renderer=renderer,
        reward_renderer=reward_renderer,
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        ledger=data.ledger,
        sft=render.texts(data.sft, renderer, "sft") if "sft" in steps else [],
        heldout_sft=render.texts(data.heldout, renderer, None),
        pairs=render.pairs(data.reward, pair_renderer, "reward") if wants_pairs else [],
        heldout_pairs=render.pairs(data.heldout, pair_renderer, None),
        prompts=render.prompts(data.ppo, renderer, "ppo") if wants_prompts else [],
        heldout_prompts=render.prompts(data.heldout, renderer, None),
        ptx=render.texts(ptx.sft, renderer, "ptx"),
        heldout_ptx=render.texts(ptx.heldout, renderer, None),
    )


class _Rendering:
    """Renders samples, entering those that do not fit under the step they were for (None: those
    that are only measured on are noted, not dropped: another measure may have room for them)."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self.config = config
        self.ledger = ledger

    def texts(
        self, samples: Sequence[Sample], renderer: Renderer, step: str | None
    ) -> list[TokenRow]:
        """Whole conversations and documents, learned as `sft.loss_on` says."""
        rows = []
        for sample in samples:
            if sample.text is not None:
                row = renderer.document(sample.text, sample.source)
            elif sample.chosen is not None:
                row = renderer.conversation(sample.prompt, sample.chosen, sample.source)
                if self.config.sft.loss_on == "all":
                    row = replace(row, response_mask=(False, *[True] * (len(row) - 1)))
            else:
                continue
            fitted = fit(row, self.config.dataset.max_tokens, self.config.dataset.on_long_row)
            self._note(sample, step, fitted)
            if fitted.row is not None:
                rows.append(fitted.row)
        return rows

    def pairs(
        self, samples: Sequence[Sample], renderer: Renderer, step: str | None
    ) -> list[PairRow]:
        """Preferred and rejected answers, their masks on the last answer alone."""
        pairs = []
        for sample in samples:
            if sample.chosen is None or sample.rejected is None:
                continue
            pair = PairRow(
                renderer.conversation(sample.prompt, sample.chosen, sample.source, True),
                renderer.conversation(sample.prompt, sample.rejected, sample.source, True),
            )
            fitted = fit_pair(pair, self.config.dataset.max_tokens, self.config.dataset.on_long_row)
            self._note(sample, step, fitted)
            if fitted.row is not None:
                pairs.append(fitted.row)
        return pairs

    def prompts(
        self, samples: Sequence[Sample], renderer: Renderer, step: str | None
    ) -> list[PromptRow]:
        """Prompts to answer."""
        prompts = []
        dataset = self.config.dataset
        for sample in samples:
            if not sample.prompt:
                continue
            row = renderer.prompt(sample.prompt, sample.columns, sample.source)
            fitted = fit_prompt(row, dataset.max_prompt_tokens, dataset.on_long_row, renderer)
            self._note(sample, step, fitted)
            if fitted.row is not None:
                prompts.append(fitted.row)
        return prompts

    def _note(self, sample: Sample, step: str | None, fitted: Fitted[Any]) -> None:
        if fitted.outcome == "kept":
            return
        if step is not None and fitted.outcome == "dropped":
            self.ledger.drop(sample.source, step, fitted.reason)
        else:
            note = f"{fitted.reason} ({step or 'measuring'})"
            self.ledger.datasets[sample.source.dataset].notes[note] += 1
