"""What rows of a batch begin with alike: whole prompts, and beginnings of different prompts.

Rows of one prompt have all of it in common. Different prompts may begin alike, with a system
prompt, examples, the schemas of tools: of that, whole blocks of 16 tokens count, so that which
tokens two rows have in common depends on these two alone, in whatever company they are, and the
tokens behind it lie in attention's blocks as they would in a whole row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

from tandem.ops.sizes import BLOCK_TOKENS
from tandem.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Beginning:
    """Tokens that different prompts begin with: those up to `end`, from the end of the beginning
    around it on. All rows of a batch with this `number` have them in common."""

    number: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Rows of a batch that begin with the same prompt.

    rows: their numbers, in order. prompt_tokens: the tokens before the first response token, 0 for
    a row without a response, which is a group of its own. beginnings: what the prompt has in common
    with those of other groups, the shortest first; each goes on from the one before.

    Example: of the prompts s q, s r a and s r b (letters are blocks of 16 tokens), the first has
    the beginning s, the others s and s r.
    """

    rows: list[int]
    prompt_tokens: int
    beginnings: tuple[Beginning, ...] = ()


def prompt_groups(batch: TokenBatch) -> list[PromptGroup]:
    """The rows of a batch by prompt, told by its tokens; in the order of the groups' first rows."""
    batch = batch.on_host()
    answered = batch.response_mask.any(dim=1).tolist()
    lengths = batch.response_mask.int().argmax(dim=1).tolist()
    ids = batch.token_ids.numpy()
    groups: dict[bytes | int, PromptGroup] = {}
    for row, (has_response, length) in enumerate(zip(answered, lengths, strict=True)):
        if not has_response:
            groups[row] = PromptGroup([row], 0)
            continue
        group = groups.setdefault(ids[row, :length].tobytes(), PromptGroup([], length))
        group.rows.append(row)
    prompts = {key: group for key, group in groups.items() if isinstance(key, bytes)}
    block = BLOCK_TOKENS * ids.itemsize
    if len({key[:block] for key in prompts}) == len(prompts):
        return list(groups.values())
    paths = find_beginnings(ids, [prompts[key] for key in sorted(prompts)])
    return [replace(group, beginnings=paths.get(group.rows[0], ())) for group in groups.values()]


def in_company(groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    """The groups in their order, but all of a beginning where its first one stands."""
    first: dict[int, int] = {}
    for place, group in enumerate(groups):
        for part in group.beginnings:
            first.setdefault(part.number, place)
    keys = [
        (*(first[part.number] for part in group.beginnings), place)
        for place, group in enumerate(groups)
    ]
    return [groups[place] for place in sorted(range(len(groups)), key=keys.__getitem__)]


def common_tokens(groups: Iterable[PromptGroup]) -> list[int]:
    """What is computed once of groups that are computed together: how many tokens a group's prompt
    has in common with those of groups before, for each that has any."""
    known: set[int] = set()
    found: list[int] = []
    for group in groups:
        found += [part.end for part in group.beginnings if part.number in known][-1:]
        known.update(part.number for part in group.beginnings)
    return found


def find_beginnings(ids: Any, groups: Sequence[PromptGroup]) -> dict[int, tuple[Beginning, ...]]:
    """The beginnings of each group that has any, by its first row.

    Args:
        ids: (B, T) numpy array of the batch's tokens.
        groups: by the bytes of their prompts, so that those that begin alike stand together.
    """
    if len(groups) < 2:
        return {}
    tokens = ids[[group.rows[0] for group in groups]]
    differ = tokens[1:] != tokens[:-1]
    alike = differ.argmax(axis=1)
    common = []
    for i, (a, b) in enumerate(pairwise(groups)):
        most = min(a.prompt_tokens, b.prompt_tokens)
        same = int(alike[i]) if differ[i].any() else most
        common.append(min(same, most) // BLOCK_TOKENS * BLOCK_TOKENS)
    numbers = count()
    found: dict[int, tuple[Beginning, ...]] = {}
    todo: list[tuple[int, int, tuple[Beginning, ...]]] = [(0, len(groups), ())]
    while todo:
        low, high, path = todo.pop()
        if high - low == 1:
            found[groups[low].rows[0]] = path
            continue
        least = min(common[low : high - 1])
        if least > (path[-1].end if path else 0):
            path = (*path, Beginning(next(numbers), least))
        cuts = [i + 1 for i in range(low, high - 1) if common[i] == least]
        todo += [(a, b, path) for a, b in pairwise([low, *cuts, high])]
    return found
