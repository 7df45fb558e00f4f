"""Blocks of KV memory found again by the tokens they hold: of other prompts, of earlier turns.

A block's keys and values depend on its own tokens and on all before them, so a block is known by
its tokens and by the block before it. Only whole blocks are shared. A block that no sequence holds
stays known until its place is needed; the one that was used longest ago goes first. As long as the
weights are the same, shared blocks hold what would be computed (on a CPU to the last bit). Where
layers keep states, a sequence needs those at the end of the last one too: `snapshots`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from tandem.generation.blocks import BlockPool
from tandem.generation.snapshots import Snapshots
from tandem.ops.sizes import BLOCK_TOKENS

Key = tuple[int, tuple[int, ...]]
"""The node of the block before (0: none) and a block's tokens."""


class PrefixPool(BlockPool):
    """A pool that knows what its blocks hold.

    Attributes:
        epoch: how often all has been forgotten; what an earlier one computed is not to be kept.
        snapshots: of states at the ends of known blocks; None where layers keep none.
    """

    def __init__(self, num_blocks: int, snapshots: Snapshots | None = None) -> None:
        """All blocks are free, none is known."""
        super().__init__(num_blocks)
        self._known: dict[Key, tuple[int, int]] = {}  # to a node, numbered once, and its block
        self._keys: dict[int, Key] = {}  # of the known blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, held by none; oldest first
        self._last_node = 0
        self.epoch = 0
        self.snapshots = snapshots

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, the known ones too."""
        return len(self._free) + len(self._idle)

    @property
    def num_known(self) -> int:
        """Blocks that can be found."""
        return len(self._known)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The known blocks that a sequence begins with, short of its last token."""
        found = []
        for key in self._chain(tokens[: len(tokens) - 1]):
            found.append(self._known[key][1])
        return found

    def keep(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """A sequence's tokens are, or soon will be, in these held blocks: its whole ones are known
        from now on, but those whose like is known already.

        Returns:
            The known block of each whole one.
        """
        node, known = 0, []
        for i in range(len(tokens) // BLOCK_TOKENS):
            key = node, tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
            if key not in self._known:
                self._forget(blocks[i])  # what it was found by before leads nowhere now
                self._last_node += 1
                self._known[key] = self._last_node, blocks[i]
                self._keys[blocks[i]] = key
            node, block = self._known[key]
            known.append(block)
        return known

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these known blocks nobody holds."""
        return sum(block in self._idle for block in blocks)

    def has_others(self, blocks: Iterable[int], than: int) -> bool:
        """Whether more sequences hold any of these."""
        return any(self._holders[block] > than for block in blocks)

    def take(self, count: int) -> list[int]:
        """As `BlockPool.take`; known blocks are used last."""
        while len(self._free) < count and self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._free.append(block)
        return super().take(count)

    def share(self, blocks: Iterable[int]) -> None:
        """As `BlockPool.share`; found blocks may be held by none before."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self._holders[block] = 1
            else:
                super().share((block,))

    def release(self, blocks: Iterable[int]) -> None:
        """As `BlockPool.release`; a known block keeps what it holds while it can."""
        # The last first: a sequence's end is forgotten before its beginning, which others share.
        for block in reversed(list(blocks)):
            super().release((block,))
            if self._holders[block] == 0 and block in self._keys:
                self._free.pop()
                self._idle[block] = None

    def forget(self, blocks: Iterable[int]) -> None:
        """What these blocks hold can be found no longer."""
        for block in blocks:
            self._forget(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def forget_all(self) -> None:
        """The weights have changed: nothing can be found."""
        self.epoch += 1
        self.forget(list(self._keys))

    def _chain(self, tokens: Sequence[int]) -> Iterator[Key]:
        node = 0
        for i in range(len(tokens) // BLOCK_TOKENS):
            key = node, tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
            if key not in self._known:
                return
            yield key
            node = self._known[key][0]

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._known[key]
            if self.snapshots is not None:
                self.snapshots.forget(block)
