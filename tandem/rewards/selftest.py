"""Before step 1: does each reward function tell a right answer from a wrong one?

A function that scores an answer alike with its own row and with other rows judges form, such as a
format or a length. Means of references and of other rows' references then differ by which texts
were drawn, so it is not tested by them, unless it reads a column that differs between the rows:
a comparison with the reference that never matches looks the same.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from tandem.errors import ConfigError
from tandem.rewards.binding import columns_read
from tandem.rewards.calling import RewardFunction
from tandem.rewards.columns import ANSWER, columns_of
from tandem.rewards.form import MESSAGES_ARE_GIVEN, TEXTS_ARE_GIVEN, reads_messages
from tandem.rewards.remote import RemoteReward
from tandem.rewards.scoring import Answers, FunctionScores, RewardFunctions
from tandem.rewards.spec import RewardSpec
from tandem.text import visible

NUM_ROWS = 8
"""Rows that are tried: the first with references that differ, then the first of the others."""
_OTHERS = 2
_ROUNDING = 1e-9
"""By how much of the largest score two means of the same scores in another order may differ."""
_ANY_ANSWER = "An answer."
_FURTHER = (
    *("4", "{}", '{"answer": 4}', _ANY_ANSWER, "<answer>4</answer>", "\\boxed{4}"),
    "```\n4\n```",
)
"""What a function is tried on that raises for the first answer: it may want a number or a form."""
_OF_THE_FUNCTION = ("exception", "result")
"""Failures by a function's own code, whatever the machine does."""
_NO_LIST = "must return a list of "


Encode = Callable[[str], list[int]]
"""An answer's text as the token ids that a policy would sample for it."""


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """A row to test on: its last user turn, its turns, its columns, its source, and what makes the
    prompt's text as `Answers` has it."""

    prompt: str
    messages: list[dict[str, str]]
    columns: Mapping[str, Any]
    source: str
    text: Callable[[], str] = str


def self_test(
    rewards: RewardFunctions,
    rows: Sequence[ReferenceRow],
    encode: Encode | None = None,
    *,
    trains: bool = True,
) -> list[str]:
    """Call each function once; then score, for a few rows, the reference answer, an empty answer
    and other rows' references.

    Args:
        encode: for functions that ask for `completion_ids`, which need it.
        trains: whether steps follow, before which a user may want the test.
    Returns:
        one line per function on what was found.
    Raises:
        ConfigError: a function with a weight takes texts for lists of messages or fails on all that
            it is tried on, a server gives no reward, or a function that judges answers by their row
            does not score the reference highest on average.
    """
    column = rewards.config.answer_column
    references = columns_of([row.columns for row in rows], column, [ANSWER])[ANSWER]
    known = [
        (row, text)
        for row, value in zip(rows, references, strict=True)
        if (text := _reference(value))
    ]
    texts = list(dict.fromkeys(text for _, text in known))
    trials = list(zip(rewards.specs, rewards.calls, strict=True))
    first = known[:1] or [(row, _ANY_ANSWER) for row in rows[:1]]
    lines: list[str] = []
    tested_too: list[tuple[RewardSpec, RewardFunction]] = []
    others = [*known[1:3], *zip(cycle(rows[:3]), _FURTHER, strict=False)]
    for spec, call in trials:
        # Not what holds state between calls, or waits for people.
        is_held = getattr(call, "in_process", False) or getattr(call, "training_only", False)
        if isinstance(call, RemoteReward) or not is_held:
            tries = [_answers(some, [], call, encode) for some in (first, others)]
            problem, notes = _tried(rewards, spec, call, *tries)
            lines += notes
            if problem and spec.weight:
                raise ConfigError(problem)
            if problem:
                lines.append(problem)
                continue
        tested_too.append((spec, call))
    if len(texts) < 2:
        line = (
            "reward functions are not tested before the first step: no two rows have different "
            f"references in the column {column} (--scoring.answer-column)"
        )
        return [*lines, line] if trains else lines
    tested = _spread(known)
    columns = columns_of([row.columns for row, _ in tested], column, [ANSWER])
    differing = [name for name, values in columns.items() if any(v != values[0] for v in values)]
    for spec, call in tested_too:
        if getattr(call, "checks_answer", True):
            answers = _answers(tested, texts, call, encode)
            (scored,) = rewards.score(answers, spec.label, tells=False)
            if rewards.config.on_failure == "stop":
                rewards.tell_failures(scored)
            found = _Found(spec, scored, answers.completions, len(tested))
            is_alone = not any(other.weight for other in rewards.specs if other is not spec)
            lines.append(_judged(found, call, columns_read(call, differing), column, is_alone))
            rewards.tell_failures(scored)  # an error would have said it
    return lines


@dataclass(frozen=True, slots=True)
class _Found:
    """What a function gave for the tested answers: of each row its reference, an empty answer and
    other rows' references, in this order."""

    spec: RewardSpec
    scored: FunctionScores
    completions: Sequence[str]
    num_rows: int

    @property
    def means(self) -> tuple[float, float, float]:
        """Mean score of the references, of the empty answers and of others' references. An answer
        without a score is left out; a mean of nothing is NaN for the references, else -inf."""
        kinds: tuple[list[float], ...] = ([], [], [])
        per_row = len(self.completions) // self.num_rows
        for i, score in enumerate(self.scored.scores):
            if score is not None:
                kinds[min(i % per_row, 2)].append(score)
        right, empty, other = (
            sum(scores) / len(scores) if scores else (math.nan if kind == 0 else -math.inf)
            for kind, scores in enumerate(kinds)
        )
        return right, empty, other

    @property
    def prefers_references(self) -> bool:
        """Whether they have the highest mean, by more than rounding."""
        right, *others = self.means
        size = max((abs(score) for score in self.scored.scores if score is not None), default=0.0)
        return all(right > mean + _ROUNDING * size for mean in others)  # NaN is not above anything

    @property
    def ignores_rows(self) -> bool:
        """Whether each answer has the same score for all rows that it was tried on without a
        failure, at least one of them its own row and another's; and whether there are scores."""
        per_row = len(self.completions) // self.num_rows
        by_text: dict[str, list[float | None]] = {}
        own: set[str] = set()
        others: set[str] = set()
        tried = zip(self.completions, self.scored.scores, self.scored.failed, strict=True)
        for i, (text, score, failed) in enumerate(tried):
            if failed:
                continue
            by_text.setdefault(text, []).append(score)
            (others if i % per_row else own).add(text)
        is_scored = any(score is not None for score in self.scored.scores)
        alike = all(_alike(scores) for scores in by_text.values())
        return is_scored and not all(self.scored.failed) and alike and bool(own & others)

    def __str__(self) -> str:
        right, empty, other = map(_shown, self.means)
        return f"reference {right}, empty {empty}, another row's reference {other}"


def _judged(
    found: _Found, call: RewardFunction, read: Sequence[str], column: str, is_alone: bool
) -> str:
    """A line on what the test found.

    Args:
        read: columns that the function reads and that differ between rows.
        is_alone: no other function has a weight.
    Raises:
        ConfigError: a function with a weight does not prefer references though it judges rows.
    """
    name, rows = f"reward function {found.spec.label}", found.num_rows
    # One that is said to check answers, and one that reads what differs, should not ignore rows.
    if found.ignores_rows and not read and not hasattr(call, "checks_answer"):
        if not _alike(found.scored.scores):
            return (
                f"{name} gives an answer the same score whatever row it is for: it is taken as a "
                "reward of form, not tested against the references"
            )
        alone = (
            ". No other function has a weight: if all answers of the policy get one score, too, "
            "nothing is learned from it"
        )
        return (
            f"{name} gives {_shown(found.means[0])} to all that it was tried on (the references of "
            f"{rows} rows and an empty answer): the self-test cannot tell whether it works"
            f"{alone if is_alone and found.spec.weight else ''}"
        )
    if found.prefers_references and not found.ignores_rows:
        return f"{name} tells answers apart on {rows} rows: {found}"
    if not found.spec.weight:
        return f"{name}, of weight 0, does not tell answers apart on {rows} rows: {found}"
    raise ConfigError(_complaint(found, column, read, reads_messages(call)))


def _spread(known: Sequence[tuple[ReferenceRow, str]]) -> list[tuple[ReferenceRow, str]]:
    """The rows to test on."""
    firsts = list({text: (row, text) for row, text in reversed(known)}.values())[::-1]
    chosen = {id(row) for row, _ in firsts}
    return [*firsts, *(pair for pair in known if id(pair[0]) not in chosen)][:NUM_ROWS]


def _alike(scores: Sequence[float | None]) -> bool:
    """Whether all scores are the same, or none is there."""
    known = [score for score in scores if score is not None]
    return not known or (len(known) == len(scores) and min(known) == max(known))


def _tried(
    rewards: RewardFunctions,
    spec: RewardSpec,
    call: RewardFunction,
    first: Answers,
    others: Answers,
) -> tuple[str, list[str]]:
    """Call a function on its first answer, so that a failure is told before models are loaded.

    Args:
        others: what it is tried on, too, if it fails on the first for a reason that may be its own.
    Returns:
        why it will fail on all answers, or ""; a line if it gives nothing and may have caught that
        it gets texts.
    """
    if not len(first):
        return "", []
    (found,) = rewards.score(first, spec.label, tells=False)
    if problem := _problem_of_first(spec.label, call, found):
        return problem, []
    if found.failures.keys() & set(_OF_THE_FUNCTION):
        if _NO_LIST in found.first:
            return _fails_on_all(call, found), []
        if not getattr(call, "checks_answer", True):  # it wants a form that no row here may have
            rewards.tell_failures(found)
            return "", []
        (further,) = rewards.score(others, spec.label, tells=False)
        if further.failures.keys() <= set(_OF_THE_FUNCTION) and all(further.failed):
            return _fails_on_all(call, FunctionScores.joined([found, further])), []
    rewards.tell_failures(found)
    (score,) = found.scores
    if not score and not found.failures and (told := reads_messages(call)):
        return "", [f"reward function {spec.label} gives {score} for its first answer: {told}"]
    return "", []


def _problem_of_first(label: str, call: RewardFunction, found: FunctionScores) -> str:
    """Why a server, or a function of the other form, will give nothing for any answer; "" if it
    may."""
    if found.failures and isinstance(call, RemoteReward):
        advice = "Start the server or correct the URL, and see whether scoring.deadline_seconds is "
        advice += "enough"
        if "result" in found.failures:
            is_ours = any(text in found.first for text in ("one per query", "finite numbers"))
            advice = "Have the server reply with a number or null for each query"
            advice += "" if is_ours else ", or correct the URL"
        return f"{found.describe()}. {advice}; --no-scoring.self-test leaves this try out."
    for given, form in ((TEXTS_ARE_GIVEN, "texts"), (MESSAGES_ARE_GIVEN, "lists of messages")):
        if given in found.first:
            return (
                f"reward function {label} must take prompts and completions as {form}; got, on "
                f"{found.first}"
            )
    return ""


def _fails_on_all(call: RewardFunction, found: FunctionScores) -> str:
    """What is said of a function that failed on all that it was tried on."""
    number = len(found.scores)
    tried = f"all {number} answers" if number > 1 else "the answer"
    return (
        f"reward function {found.label}{_place_of(call)} must score answers; it failed on {tried} "
        f"that it was tried on; the first: {found.first}. Fix the function, or have it return None "
        "for answers of another form; --no-scoring.self-test leaves this try out."
    )


def _place_of(call: RewardFunction) -> str:
    """The file and line of a function, in brackets; "" where there are none."""
    function: Any = call
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    return f" ({visible(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""


def _reference(value: Any) -> str:
    """A reference answer as text; "" for what is none."""
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if is_text else ""


def _answers(
    rows: Sequence[tuple[ReferenceRow, str]],
    texts: Sequence[str],
    call: RewardFunction,
    encode: Encode | None,
) -> Answers:
    """The answers to score: of each row its reference and, if there are `texts` to take others'
    from, an empty one and those of others."""
    completion = getattr(call, "as_completion", str)
    num_others = max(0, min(_OTHERS, len(texts) - 1))
    tried: list[tuple[ReferenceRow, str]] = []
    for row, reference in rows:
        at = texts.index(reference) if texts else 0
        others = [texts[(at + k + 1) % len(texts)] for k in range(num_others)]
        empty = [""] if texts else []
        tried += [(row, text) for text in [completion(reference), *empty, *map(completion, others)]]
    return Answers(
        prompts=[row.prompt for row, _ in tried],
        completions=[text for _, text in tried],
        messages=[row.messages for row, _ in tried],
        rows=[row.columns for row, _ in tried],
        sources=[row.source for row, _ in tried],
        completion_ids=[encode(text) for _, text in tried] if encode else None,
        prompt_texts=[row.text() for row, _ in tried],
    )


def _complaint(found: _Found, column: str, read: Sequence[str], form: str) -> str:
    if all(found.scored.failed):  # its scores say nothing
        off = "turn the test off with --no-scoring.self-test"
        return f"{found.scored.describe()}. Fix the function, or {off}."
    right, empty, other = (_shown(mean) for mean in found.means)
    though = f", though it reads the column {read[0]}" if read else ""
    same = f"it gives an answer the same score whatever row it is for{though}"
    ignored = same if found.ignores_rows else ""
    causes = "".join(f"; {cause}" for cause in (found.scored.describe(), form, ignored) if cause)
    return (
        f"reward function {found.spec.label} must score the reference answer (column {column}) "
        f"above an empty answer and above another row's reference; got {right}, {empty} and "
        f"{other} (means over {found.num_rows} rows){causes}. Fix the function; give it the "
        "attribute checks_answer = False if it does not judge right and wrong; or turn the test "
        "off with --no-scoring.self-test."
    )


def _shown(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "none"
