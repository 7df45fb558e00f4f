"""What copies of split modules rely on in torch, and what is said where it is otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tandem.errors import ModelError
from tandem.models import shared_copy
from tandem.models.shared_copy import shared_copy as copies_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    shared_copy._require_known_torch.cache_clear()
    yield
    shared_copy._require_known_torch.cache_clear()


def split(*bases: type) -> nn.Module:
    module = nn.Linear(2, 2)
    module.__class__ = type("FSDPLinear", bases, {})
    return module


def test_a_split_module_is_copied_as_what_it_was() -> None:
    class Own(nn.Linear):
        pass

    for kind in (nn.Linear, Own):
        module = split(FSDPModule, kind)
        assert type(copies_of(module, own_forward=True)[module]) is kind


def test_another_way_to_split_is_named() -> None:
    class More(nn.Linear):
        pass

    class Also(nn.Linear):
        pass

    with pytest.raises(ModelError, match="must have a class made of FSDPModule and its own; got"):
        copies_of(split(FSDPModule, More, Also))


def test_another_place_of_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "_HOOKS", shared_copy._HOOKS[1:])
    with pytest.raises(ModelError, match=r"must keep their hooks in .*; got .*_forward_hooks"):
        copies_of(split(FSDPModule, nn.Linear))
