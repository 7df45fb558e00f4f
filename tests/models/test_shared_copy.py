"""What copies of split modules rely on in torch, and what is said where it is otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tandem.errors import ModelError
from tandem.models import shared_copy
from tandem.models.shared_copy import Switch, copied


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
        twin = copied(split(FSDPModule, kind), {}, None, Switch(on=False))
        assert type(twin) is kind


def test_another_way_to_split_is_named() -> None:
    class More(nn.Linear):
        pass

    class Also(nn.Linear):
        pass

    with pytest.raises(ModelError, match="must be of a class made of FSDPModule and its own; got"):
        copied(split(FSDPModule, More, Also), {}, None, Switch(on=False))


def test_another_place_of_hooks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copy, "_HOOKS", shared_copy._HOOKS[1:])
    with pytest.raises(ModelError, match=r"must keep their hooks in .*; got .*_forward_hooks"):
        copied(split(FSDPModule, nn.Linear), {}, None, Switch(on=False))
