"""How long a run's rows are, read off its data with its tokenizer, before torch is imported.

Of many rows, evenly spaced ones are taken, and a sample of these is rendered by the model's chat
template and tokenized. An answer is its text and one token that ends it, so lengths are within a
token or two of the run's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config.schema import RunConfig, rl_section
from tandem.config.stages import Stage, in_order, leaving, rl_stage
from tandem.data.assign import Dataset
from tandem.data.chat.own_template import read_template
from tandem.data.dataset import load_data, load_text
from tandem.data.grades import rankings_of
from tandem.data.loader import evenly
from tandem.data.sampled import sampled
from tandem.errors import DataError
from tandem.message import answer_text
from tandem.ops.sizes import BLOCK_TOKENS
from tandem.plan.prompt_frame import Count, PromptFrame
from tandem.predict.rows import Heldout, Rows, rows_of
from tandem.rewards.tool_schema import offered_tools
from tandem.text import counted
from tandem.types import Sample

SAMPLED = 256
"""Rows of each share that are tokenized."""
_CHARACTERS_PER_TOKEN = 4.0


def rows_by_stage(config: RunConfig, model: str) -> dict[str, Rows]:
    """The rows of each stage of a run. Without data: as long as the knobs allow, of unknown number.

    Args:
        model: whose tokenizer counts, if it is a folder with tokenizer.json.
    Raises:
        DataError, ConfigError: the data cannot be read.
    """
    stages = in_order(config.stages)
    own = read_template(config.dataset.own_template)
    if not config.data and not config.sft_data:
        return {stage.name: longest_rows(config, stage) for stage in stages}
    count, before, how = _counter(model)
    frame = PromptFrame(Path(model).expanduser(), count, before, own)
    read, every = sampled((*config.data, *config.sft_data, *config.eval_data))
    data = load_data(
        config.dataset, config.data, config.sft_data, config.eval_data, seed=config.seed,
        stages=config.stages, grades=config.reward.grades, read=read,
    )  # fmt: skip
    offered = offered_tools(rl_section(config).tools, f"{rl_stage(config.stages).section}.tools")
    if offered:
        prompts = [replace(sample, tools=sample.tools or offered) for sample in data.prompts]
        data = replace(data, prompts=prompts)
    ptx, mixed = 0.0, []
    if rl_section(config).ptx_data:
        named = rl_section(config).ptx_data
        scores = bool(leaving(config.stages, "reward model"))
        found = load_text(
            named, config.dataset, seed=config.seed, scores=scores, read=sampled(named)[0]
        )
        texts, mixed = found.train, found.heldout
        lengths = [sum(n for n, _ in _whole(s, count, frame)) for s in _some(texts)]
        ptx = min(sum(lengths) / max(1, len(lengths)), config.dataset.max_tokens)
    heldout = heldout_rows(config, data.heldout, mixed, count, frame, every)
    return {
        stage.name: replace(
            _rows(config, stage, data, count, frame, how, ptx, every), heldout=heldout
        )
        for stage in stages
    }


def heldout_rows(
    config: RunConfig,
    samples: Sequence[Sample],
    mixed: Sequence[Sample],
    count: Count,
    frame: PromptFrame,
    every: int,
) -> Heldout:
    """What evaluations read.

    Args:
        samples: held out; mixed: of `ptx_data`. every: rows that each of them stands for.
    """
    alike = frame.common_tokens((s.prompt, s.tools) for s in _some(samples) if s.text is None)
    alike = alike // BLOCK_TOKENS * BLOCK_TOKENS
    longest, longest_prompt = config.dataset.max_tokens, config.dataset.max_prompt_tokens

    def rows(
        chosen: Sequence[Sample],
        measure: Callable[[Sample], list[tuple[int, int]]],
        limit: int = longest,
        *,
        share: bool = False,
    ) -> Rows:
        measured = [measure(sample) for sample in _some(chosen)]
        if config.dataset.on_long_row == "truncate":
            measured = [[(min(n, limit), min(a, limit)) for n, a in row] for row in measured]
        kept = [row for row in measured if max(n for n, _ in row) <= limit]
        if not kept:
            return Rows()
        each = [[sequence] for row in kept for sequence in row]
        number = round(every * len(chosen) * len(each) / len(measured))
        found = replace(rows_of(each, number, ""), alike=alike)
        together = rows_of(kept, number, "")  # with prompts once
        return replace(found, tokens=together.tokens / together.sequences) if share else found

    def whole(sample: Sample) -> list[tuple[int, int]]:
        return _whole(sample, count, frame)

    def answers(sample: Sample) -> list[tuple[int, int]]:
        return _pair(sample, count, frame)

    def prompt(sample: Sample) -> list[tuple[int, int]]:
        return [(frame.tokens(sample.prompt, sample.tools), 0)]

    ranked = [replace(sample, ranking=()) for sample in rankings_of(samples)]
    return Heldout(
        texts=rows([s for s in samples if _has_text(s)], whole),
        pairs=rows([s for s in ranked if s.is_pair], answers),
        graded=rows([s for s in samples if s.grade is not None], lambda s: answers(s)[:1]),
        labelled=rows([s for s in ranked if s.label is not None or s.is_pair], answers, share=True),
        prompts=rows([s for s in samples if s.prompt], prompt, longest_prompt),
        ptx=rows([s for s in mixed if _has_text(s)], whole),
    )


def _has_text(sample: Sample) -> bool:
    return sample.text is not None or sample.chosen is not None


def longest_rows(config: RunConfig, stage: Stage) -> Rows:
    """Rows of the greatest length that the knobs allow, an unknown number of them."""
    sequences = 2 if stage.family == "pairs" and not stage.labelled else 1
    length = config.dataset.max_tokens
    if stage.family == "rl":
        sequences, length = 1, config.dataset.max_prompt_tokens
    return Rows(
        sequences=sequences,
        tokens=sequences * length,
        answered=sequences * length if stage.family != "rl" else 0,
        longest=length,
        widest=sequences * length,
        ptx=config.dataset.max_tokens if stage.family == "rl" else 0.0,
        source="no data given: rows as long as the limits",
    )


def _rows(
    config: RunConfig,
    stage: Stage,
    data: Dataset,
    count: Count,
    frame: PromptFrame,
    how: str,
    ptx: float,
    every: int,
) -> Rows:
    """Of one stage. every: rows that each row of `data` stands for."""
    samples = data.prompts if stage.share == "prompts" else getattr(data, stage.share)
    limit = config.dataset.max_tokens
    if stage.share == "prompts":
        limit = config.dataset.max_prompt_tokens
        measured = [[(frame.tokens(s.prompt, s.tools), 0)] for s in _some(samples)]
    elif stage.share == "texts":
        measured = [_whole(s, count, frame) for s in _some(samples)]
    else:
        measured = [_pair(s, count, frame) for s in _some(samples)]
        if stage.labelled:
            measured = [[one] for row in measured for one in row]
    kept = _kept(config, stage, measured, _some(samples), limit, frame)
    if measured and not kept:
        knob = "max_prompt_tokens" if stage.share == "prompts" else "max_tokens"
        raise DataError(
            f"stage {stage.name} must have at least one row; got none: all {len(measured)} that "
            f"were measured are longer than dataset.{knob} {limit}. Raise it."
        )
    if not kept:
        return longest_rows(config, stage)
    each = len(measured) / max(1, len(_some(samples)))
    number = round(every * len(samples) * each * len(kept) / len(measured))
    about = "about " if every > 1 else ""
    found = rows_of(kept, number, f"{about}{counted(number, 'row')}, {how}")
    if stage.leaves == "reward model":  # its head reads the last token alone
        found = replace(found, answered=found.sequences)
    alike = frame.common_tokens((s.prompt, s.tools) for s in _some(samples) if s.text is None)
    found = replace(found, alike=alike // BLOCK_TOKENS * BLOCK_TOKENS)
    return replace(found, ptx=ptx) if stage.family == "rl" else found


def _kept(
    config: RunConfig,
    stage: Stage,
    measured: Sequence[list[tuple[int, int]]],
    samples: Sequence[Sample],
    limit: int,
    frame: PromptFrame,
) -> list[list[tuple[int, int]]]:
    """The rows that `dataset.on_long_row` leaves, at their lengths then (see `data.length`)."""
    if config.dataset.on_long_row != "truncate":
        return [row for row in measured if max(tokens for tokens, _ in row) <= limit]
    if stage.share == "prompts":  # the oldest turns go
        lengths = [_shortened(sample, frame, limit) for sample in samples]
        return [[(length, 0)] for length in lengths if length]
    if stage.share == "texts":  # which may have answers before the last one
        begins = [0 if s.text is not None else frame.tokens(s.prompt, s.tools) for s in samples]
    else:
        begins = [max(tokens - answer for tokens, answer in row) for row in measured]
    return [  # the last answer is cut, and must not be gone
        [(min(tokens, limit), answered - max(0, tokens - limit)) for tokens, answered in row]
        for row, begin in zip(measured, begins, strict=True)
        if begin < limit
    ]


def _shortened(sample: Sample, frame: PromptFrame, limit: int) -> int:
    """Tokens of a prompt without as many of its oldest turns as it takes, but for system turns; 0
    if from its last user turn on it is too long."""
    prompt = sample.prompt
    users = [place for place, turn in enumerate(prompt) if turn.role == "user"]
    for first in dict.fromkeys((0, *users)):
        system = [turn for turn in prompt[:first] if turn.role == "system"]
        if (length := frame.tokens([*system, *prompt[first:]], sample.tools)) <= limit:
            return length
    return 0


def _some(samples: Sequence[Sample]) -> list[Sample]:
    """At most SAMPLED of them, evenly spaced."""
    return evenly(samples, SAMPLED)


def _whole(sample: Sample, count: Count, frame: PromptFrame) -> list[tuple[int, int]]:
    if sample.text is not None:
        length = count(sample.text) + 1
        return [(length, length)]
    answer = count(answer_text(sample.chosen or "")) + 1
    earlier = sum(count(answer_text(m)) + 1 for m in sample.prompt if m.role == "assistant")
    return [(frame.tokens(sample.prompt, sample.tools) + answer, earlier + answer)]


def _pair(sample: Sample, count: Count, frame: PromptFrame) -> list[tuple[int, int]]:
    prompt = frame.tokens(sample.prompt, sample.tools)
    texts = [answer for _, answer in sample.ranking] if len(sample.ranking) > 2 else None
    answers = texts or [t for t in (sample.chosen, sample.rejected) if t is not None]
    lengths = [count(answer_text(answer)) + 1 for answer in answers or [""]]
    return [(prompt + length, length) for length in lengths]


def _counter(model: str) -> tuple[Count, int | None, str]:
    """How to count a text's tokens, how many more a tokenizer puts before a text (None without
    one), and a word on it."""
    file = Path(model).expanduser() / "tokenizer.json"
    if model and file.is_file():
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(file))

        def count(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False).ids)

        before = len(tokenizer.encode("a", add_special_tokens=True).ids) - count("a")
        return count, before, "a sample tokenized"
    return (
        lambda text: round(len(text) / _CHARACTERS_PER_TOKEN),
        None,
        "four characters a token",
    )
