"""Control tokens in people's text: in every role and field, never a control id, never changed.

The oracle knows nothing of how text is cut: the control ids of a rendered conversation must be
those of the same conversation with harmless words, and (where the tokenizer is lossless) all its
ids together must decode to what the chat template writes for the hostile one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tandem.data.render import Renderer
from tandem.data.shapes.shaping import to_sample
from tandem.data.tokenview import render
from tandem.errors import DataError
from tandem.types import Message, Source
from tests.battery.figures import record
from tests.battery.injections import control_strings, hostile_dialog, injection
from tests.data import built_tokenizers as built

SOURCE = Source("hostile", "hostile.jsonl", 1)
_SHORT, _FULL = 40, 900
_ROLES = (
    ("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "tool"),
    ("system", "user", "assistant", "tool", "assistant", "user"),
)  # fmt: skip
_BUILT: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level chatml": built.byte_level,
    "byte-level default": lambda: built.byte_level(None),
    "byte-level plain": lambda: built.byte_level(built.PLAIN),
    "byte-level bos": lambda: built.byte_level(None, adds_bos=True),
    "byte-level thinking": lambda: built.byte_level(built.THINKING),
    "folding": built.folding,
    "sentencepiece": lambda: built.sentencepiece(None),
    "sentencepiece always": lambda: built.sentencepiece(None, "always"),
}
_STORED = (
    "tokenizers/gpt2", "tokenizers/smollm2", "tokenizers/torchtitan_small",
    "models/stories260K/hf", "models/babyllama105/hf",
)  # fmt: skip
_FORGETS_THINKING = "byte-level thinking"  # its template writes earlier answers again, otherwise


class Target:
    """A tokenizer under attack."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer)
        self.control = control_strings(tokenizer)
        self.strings = sorted(set(self.control.values()))
        probe = " a  b\n\n c\t1.5 é日本🙂 \r\n ,"
        ids = tokenizer.encode("x" + probe, add_special_tokens=False)
        self.is_lossless = self.decode(ids) == "x" + probe

    def decode(self, ids: list[int]) -> str:
        """All of it, control tokens by name."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def controls(self, ids: tuple[int, ...]) -> list[int]:
        """The control ids in order."""
        return [i for i in ids if i in self.control]

    def shows_prompt(self, harmless: list[Message]) -> bool:
        """Whether a prompt's ids decode to the template's very text: no space of the tokenizer's
        own, no EOS that the template does not write."""
        ids = self.renderer.prompt(harmless, {}, SOURCE).token_ids
        return self.decode(list(ids)) == self.written(harmless, True)

    def written(self, messages: list[Message], prompt: bool) -> str:
        """What the template writes for them."""
        dialog = [{"role": m.role, "content": m.content} for m in messages]
        template = self.renderer.chat_template
        text = self.tokenizer.apply_chat_template(
            dialog, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)


@pytest.fixture(scope="module")
def stored_targets(shared: Path) -> list[Target]:
    return [Target(name, AutoTokenizer.from_pretrained(shared / name)) for name in _STORED]


@pytest.fixture(scope="module")
def built_targets() -> list[Target]:
    return [Target(name, make()) for name, make in _BUILT.items()]


def _attack_roles(target: Target, random: Random) -> str:
    """A hostile conversation with a hostile answer, against the same with harmless words."""
    roles = random.choice(_ROLES)
    if target.name == _FORGETS_THINKING:
        roles = tuple(role for role in roles if role != "assistant")
    messages = hostile_dialog(target.strings, random, roles)
    answer = injection(target.strings, random)
    try:
        row = target.renderer.conversation(messages, answer, SOURCE)
        prompt = target.renderer.prompt(messages, {}, SOURCE)
    except DataError as error:
        return _refused(error)
    harmless = [Message(m.role, "x") for m in messages]
    plain = target.renderer.conversation(harmless, "x", SOURCE)
    assert target.controls(row.token_ids) == target.controls(plain.token_ids), (messages, answer)
    assert row.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    if target.is_lossless:
        if target.shows_prompt(harmless):
            assert target.decode(list(prompt.token_ids)) == target.written(messages, True)
        _assert_answer_kept(target, row.token_ids[len(prompt.token_ids) :], answer)
    return "rendered"


def _assert_answer_kept(target: Target, ids: tuple[int, ...], answer: str) -> None:
    said = target.renderer.decode(ids)
    # Templates may trim what they are given; nothing else of it may change.
    assert said in (answer, answer.strip()), (answer, said)


def _refused(error: DataError) -> str:
    assert str(error).isprintable()
    return "refused"


def _attack_document(target: Target, random: Random) -> str:
    text = injection(target.strings, random)
    try:
        row = target.renderer.document(text, SOURCE)
    except DataError as error:
        return _refused(error)
    plain = target.renderer.document("x", SOURCE)
    assert target.controls(row.token_ids) == target.controls(plain.token_ids), text
    if target.is_lossless:
        begin = len(target.controls(row.token_ids)) - 1  # BOS or nothing; EOS is the last
        assert target.decode(list(row.token_ids[begin:-1])) == text
    return "rendered"


def _fields(text: Callable[[], str]) -> Iterator[dict[str, object]]:
    """A row of every shape, each of its fields by `text`."""
    yield {"prompt": text(), "chosen": text(), "rejected": text(), "system": text()}
    shared = f"\n\nHuman: {text()}\n\nAssistant: "
    yield {"chosen": shared + text(), "rejected": shared + text()}
    yield {"prompt": text(), "completion": text()}
    yield {"messages": [{"role": r, "content": text()} for r in ("system", "user", "assistant")]}
    yield {"conversations": [{"from": f, "value": text()} for f in ("human", "gpt")]}
    yield {"instruction": text(), "input": text(), "output": text()}
    yield {"question": text(), "answer": text()}
    yield {"text": text()}
    yield {"prompt": text(), "system": text()}


def _attack_fields(target: Target, random: Random) -> str:
    """One row of each shape: what its parts render to has the harmless row's control ids."""
    hostile_rows = list(_fields(lambda: injection(target.strings, random)))
    row, harmless = random.choice(list(zip(hostile_rows, _fields(lambda: "x"), strict=True)))
    if harmless.get("rejected") == "x":
        harmless["rejected"] = "y"
    elif "rejected" in harmless:
        harmless["rejected"] = str(harmless["rejected"]) + "y"
    try:
        sample = to_sample(row, SOURCE).sample
        parts = render(target.renderer, sample)
    except DataError as error:
        return _refused(error)
    roles = [message.role for message in sample.prompt]
    plain_sample = to_sample(harmless, SOURCE).sample
    if roles != [message.role for message in plain_sample.prompt]:
        return "another dialog"  # the text itself spelled turns of a transcript
    plain = render(target.renderer, plain_sample)
    for name, part in parts.items():
        assert target.controls(part.token_ids) == target.controls(plain[name].token_ids), (
            name, row,
        )  # fmt: skip
    return "rendered"


_ATTACKS = (_attack_roles, _attack_document, _attack_fields)


def _battery(targets: list[Target], num_each: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for number, target in enumerate(targets):
        random = Random(number)
        for i in range(num_each):
            try:
                outcomes[_ATTACKS[i % len(_ATTACKS)](target, random)] += 1
            except BaseException as error:
                error.add_note(f"injection {i} of tokenizer {target.name}")
                raise
    return outcomes


def test_injections_in_short(built_targets: list[Target]) -> None:
    outcomes = _battery(built_targets, _SHORT)
    assert outcomes["rendered"] > outcomes.total() / 2


def test_injections_into_stored_tokenizers_in_short(stored_targets: list[Target]) -> None:
    assert sum(target.is_lossless for target in stored_targets) >= 2
    outcomes = _battery(stored_targets, _SHORT // 2)
    assert outcomes["rendered"] > outcomes.total() / 2


@pytest.mark.slow
def test_injections(built_targets: list[Target], stored_targets: list[Target]) -> None:
    targets = built_targets + stored_targets
    outcomes = _battery(targets, _FULL)
    lossless = sum(target.is_lossless for target in targets)
    record(
        "control-token injections", injections=outcomes.total(), tokenizers=len(targets),
        lossless=lossless, seeds=f"0-{len(targets) - 1}", **outcomes, control_ids_from_text=0,
    )  # fmt: skip
    assert outcomes.total() >= 10_000
