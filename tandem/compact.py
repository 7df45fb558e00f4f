"""Ids of tokens, and marks on them, in the fewest bytes: data sets have millions.

A tuple of ids takes 40 bytes for each, one of marks 8. Here it is 4 and 1. Both behave as the tuple
of the same would: equal to it, with its hash, and never changed.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Self, TypeVar, overload

Number = TypeVar("Number", bound=int)


class _Compact(Sequence[Number], Generic[Number]):
    """Numbers as bytes.

    Attributes:
        packed: these bytes, in the machine's own order; `unpacked` takes them.
    """

    __slots__ = ("packed",)

    def __init__(self, numbers: Iterable[Number]) -> None:
        self.packed = self._pack(numbers)

    @classmethod
    def unpacked(cls, packed: bytes) -> Self:
        """The numbers of which these are the bytes."""
        made = cls.__new__(cls)
        made.packed = packed
        return made

    @classmethod
    def of(cls, numbers: Iterable[Number]) -> Self:
        """The numbers, as they are if they are compact."""
        return numbers if isinstance(numbers, cls) else cls(numbers)

    @staticmethod
    @abstractmethod
    def _pack(numbers: Iterable[Number]) -> bytes: ...

    @abstractmethod
    def _view(self) -> memoryview[Number]: ...

    def __len__(self) -> int:
        return len(self._view())

    def __iter__(self) -> Iterator[Number]:
        return iter(self._view())

    @overload
    def __getitem__(self, place: int) -> Number: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: int | slice) -> Number | Self:
        if isinstance(place, slice):
            return self.unpacked(self._view()[place].tobytes())
        return self._view()[place]

    def index(self, number: int, start: int = 0, stop: int | None = None) -> int:
        return tuple(self).index(number, start, len(self) if stop is None else stop)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):
            return self.packed == other.packed
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class TokenIds(_Compact[int]):
    """Ids of tokens, 0 to 2^31 - 1.

    Raises:
        OverflowError: an id is larger.
    """

    __slots__ = ()

    @staticmethod
    def _pack(numbers: Iterable[int]) -> bytes:
        return array("i", numbers).tobytes()

    def _view(self) -> memoryview[int]:
        return memoryview(self.packed).cast("i")


class Marks(_Compact[bool]):
    """A mark for each token."""

    __slots__ = ()

    @staticmethod
    def _pack(numbers: Iterable[bool]) -> bytes:
        return bytes(map(bool, numbers))

    def _view(self) -> memoryview[bool]:
        return memoryview(self.packed).cast("?")
