"""Generation marks in a chat template: `{% generation %}` around what the assistant writes.

Trainers that learn from the assistant's words alone (TRL's `assistant_only_loss`) need them, and
few published templates have them. A template whose assistant turns are one expression, such as

    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}

gets them around the content and the terminator; any other stays as it is. The result is kept only
if it writes the same texts as before and Hugging Face finds exactly the assistant's words in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import chat_template_utils

from tandem.data.chat.template_limits import deadline

Render = Callable[[str, Sequence[dict[str, str]], bool], tuple[str, list[str]]]
"""A template, turns and whether the assistant is to begin, to their text and what is marked in
it."""

_TEXT = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_OUTPUT = re.compile(rf"\{{\{{(-?)((?:{_TEXT}|[^'\"}}])*?)(-?)\}}\}}")
_INSIDE = re.compile(rf"{_TEXT}|\((?:{_TEXT}|[^'\"()])*\)")
_OPERAND = re.compile(rf"(?:{_TEXT}|\((?:{_TEXT}|[^'\"()])*\)|[^'\"()+~])+")
_CONTENT = re.compile(
    r"\(?\s*(\w+)(?:\.content|\[(?:'content'|\"content\")\])\s*(?:\|\s*trim\s*|\.strip\(\)\s*)?\)?"
)
_NOT_A_SUM = re.compile(r"[<>=!,]|\b(?:if|else|and|or|not|in|is)\b")
_BEGIN, _END = "{% generation %}", "{% endgeneration %}"
_HAS_MARKS = re.compile(r"\{%-?\s*generation\b")
_PROBES = (("Qz7a",), ("Qz7a", "Qz7b"))


def marked(source: str, terminator: str, eos_token: str, render: Render) -> str:
    """The template with marks, or as it is if it has some, or if they cannot be put.

    Args:
        terminator: the control string that ends an assistant's turn.
        eos_token: what the template's `eos_token` stands for.
    """
    if _HAS_MARKS.search(source) or not terminator:
        return source
    parts, position, changed = [], 0, False
    for found in _OUTPUT.finditer(source):
        new = _with_marks(found, terminator, eos_token)
        if new is not None:
            parts += [source[position : found.start()], new]
            position, changed = found.end(), True
    result = "".join([*parts, source[position:]])
    return result if changed and _is_same(source, result, terminator, render) else source


def marked_in_time(source: str, terminator: str, tokenizer: Any) -> str:
    """`marked` for a tokenizer; as it is if trying the marks takes too long."""
    try:
        with deadline():
            return marked(source, terminator, str(tokenizer.eos_token), rendering(tokenizer))
    except TimeoutError:
        return source


def _with_marks(found: re.Match[str], terminator: str, eos_token: str) -> str | None:
    """One expression that writes a turn, with marks where the turn is the assistant's."""
    left, body, right = found.groups()
    operands = [operand.strip() for operand in _OPERAND.findall(body)]
    # A sum fails on what is no text, where ~ writes it: neither is written as the other.
    plus = "~" if "~" in _INSIDE.sub("", body) else "+"
    if "".join(plus.join(operands).split()) != "".join(body.split()):
        return None
    if any(_NOT_A_SUM.search(_INSIDE.sub(" ", operand)) for operand in operands):
        return None
    places = [i for i, operand in enumerate(operands) if _CONTENT.fullmatch(operand)]
    if len(places) != 1:
        return None
    before, content, after = operands[: places[0]], operands[places[0]], operands[places[0] + 1 :]
    cut = _cut(after, terminator, eos_token)
    if cut is None:
        return None
    written, rest = cut
    turn = _CONTENT.fullmatch(content)
    assert turn is not None
    return (
        f"{{{{{left} '' }}}}{{% if {turn[1]}['role'] == 'assistant' %}}{_output(before, plus)}"
        f"{_BEGIN}{_output([content, *written], plus)}{_END}{_output(rest, plus)}{{% else %}}"
        f"{_output([body.strip()], plus)}{{% endif %}}{{{{ '' {right}}}}}"
    )


def _cut(after: list[str], terminator: str, eos_token: str) -> tuple[list[str], list[str]] | None:
    """What follows the content, up to the terminator and beyond it; None without one."""
    for i, operand in enumerate(after):
        if operand == "eos_token" and terminator == eos_token:
            return after[: i + 1], after[i + 1 :]
        if re.fullmatch(_TEXT, operand) and terminator in operand:
            end = operand.index(terminator) + len(terminator)
            quote = operand[0]
            rest = [quote + operand[end:]] if operand[end:] != quote else []
            return [*after[:i], operand[:end] + quote], [*rest, *after[i + 1 :]]
    return None


def _output(operands: Sequence[str], plus: str) -> str:
    return f"{{{{ {f' {plus} '.join(operands)} }}}}" if operands else ""


def _is_same(source: str, result: str, terminator: str, render: Render) -> bool:
    """Whether both templates write the same texts, in which the marks enclose the assistant's
    words."""
    tried = 0
    for answers in _PROBES:
        turns: list[dict[str, str]] = []
        for answer in answers:
            turns += [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": answer},
            ]
        system = {"role": "system", "content": "be brief"}
        for conversation in (turns, [system, *turns], turns[:-1], [system, *turns[:-1]]):
            begins = conversation[-1]["role"] == "user"
            before = _tried(render, source, conversation, begins)
            if before is None:  # the template refuses such turns
                continue
            after = _tried(render, result, conversation, begins)
            if after is None or after[0] != before[0]:
                return False
            expected = [turn for turn in conversation if turn["role"] == "assistant"]
            if [span.strip() for span in after[1]] != [t["content"] + terminator for t in expected]:
                return False
            tried += 1
    return tried > 0


def _tried(
    render: Render, template: str, turns: Sequence[dict[str, str]], begins: bool
) -> tuple[str, list[str]] | None:
    try:
        return render(template, turns, begins)
    except TimeoutError:
        raise
    except Exception:  # a template is a program: it can divide by zero
        return None


def rendering(tokenizer: Any) -> Render:
    """How a tokenizer renders, and where Hugging Face finds the marks: it looks for them in vain in
    what a macro or a block hands on."""

    def render(
        template: str, turns: Sequence[dict[str, str]], begins: bool
    ) -> tuple[str, list[str]]:
        how: dict[str, Any] = {"chat_template": template, "add_generation_prompt": begins}
        text = str(tokenizer.apply_chat_template(list(turns), tokenize=False, **how))
        if not _HAS_MARKS.search(template):
            return text, []
        how |= tokenizer.special_tokens_map
        rendered: Any = chat_template_utils.render_jinja_template(  # its annotation is wrong
            [list(turns)], return_assistant_tokens_mask=True, **how
        )
        [again], [spans] = rendered
        return text, [again[start:end] for start, end in spans]

    return render
