"""Rows whose text spells control tokens, as a chat template's output does; counted per data set.

Text never becomes a control token (see `control`), so such rows train on the spelled-out tokens of
a second template within the first. They are used as they are, and noted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.data.chat.changed_json import texts_of, tool_texts
from tandem.data.ledger import Ledger
from tandem.data.render import Renderer
from tandem.message import answer_turn
from tandem.types import Sample, Source

_SHOWN = 4


@dataclass
class _Found:
    """Rows of one data set that spell control tokens, and which ones."""

    sources: list[Source] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, source: Source, tokens: Iterable[str]) -> None:
        self.sources.append(source)
        self.tokens.update(set(tokens))

    def shown(self) -> str:
        ordered = sorted(self.tokens, key=lambda token: (-self.tokens[token], token))
        more = len(ordered) - _SHOWN
        return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def note_spelled(samples: Iterable[Sample], renderer: Renderer, ledger: Ledger) -> None:
    """Note in the ledger how many rows spell control tokens of the renderer's tokenizer.

    Args:
        samples: of the ledger's data sets; one that comes again by its weight counts once.
    """
    rendered: dict[str, _Found] = defaultdict(_Found)
    others: dict[str, _Found] = defaultdict(_Found)
    for sample in {id(sample): sample for sample in samples}.values():
        tokens = [token for text in texts_in(sample) for token in renderer.spelled(text)]
        if frame := [token for token in tokens if token in renderer.frame]:
            rendered[sample.source.dataset].add(sample.source, frame)
        elif tokens:
            others[sample.source.dataset].add(sample.source, tokens)
    advice = (
        ": it looks already rendered. Give its turns as messages, or prompt and answer without them"
    )
    for kinds, more in ((rendered, advice), (others, "")):
        for name, found in kinds.items():
            spelled = f"the text spells control tokens {found.shown()}, encoded as plain text"
            for source in found.sources:
                ledger.datasets[name].note(spelled + more, source)


def texts_in(sample: Sample) -> Iterable[str]:
    """All text of a sample."""
    ranked = [answer for _, answer in sample.ranking]
    answers = ranked or (sample.chosen, sample.rejected)
    for turn in (*sample.prompt, *(answer_turn(answer) for answer in answers if answer)):
        yield from texts_of(turn)
    yield from tool_texts(sample.tools)
    if sample.text:
        yield sample.text
