"""When Python's garbage collector works."""

from __future__ import annotations

import gc
import weakref

import pytest

from tandem.garbage import collected_seldom, no_collection_of_old_objects


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage() -> None:
    """In place of what spares the other tests this: here nothing is frozen before."""
    gc.unfreeze()


class Node:
    me: Node


def cycle() -> weakref.ref[Node]:
    node = Node()
    node.me = node
    return weakref.ref(node)


def test_the_garbage_collector_skips_what_a_stage_keeps_and_collects_what_its_steps_make() -> None:
    kept = Node()
    with no_collection_of_old_objects():
        made = cycle()
        tracked = {id(found) for found in gc.get_objects()}
        assert id(kept) not in tracked
        gc.collect()
        assert made() is None
    assert gc.get_freeze_count() == 0
    assert id(kept) in {id(found) for found in gc.get_objects()}


def test_an_inner_block_collects_and_leaves_what_is_frozen_to_the_outer_one() -> None:
    kept = Node()
    with no_collection_of_old_objects():
        before, garbage = gc.get_freeze_count(), cycle()
        with no_collection_of_old_objects():
            assert garbage() is None
            made = cycle()
        # Not the same: what nobody refers to any more goes, frozen or not.
        assert 0 < gc.get_freeze_count() <= before
        assert id(kept) not in {id(found) for found in gc.get_objects()}
        gc.collect()
        assert made() is None, "what the inner one made can be collected"
    assert gc.get_freeze_count() == 0


def test_many_new_objects_are_looked_at_once_and_python_s_thresholds_come_back() -> None:
    before = gc.get_threshold()
    starts = []

    def begun(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            starts.append(info["generation"])

    gc.callbacks.append(begun)
    try:
        with collected_seldom():
            kept = [[number] for number in range(300_000)]
        seldom = len(starts)
        kept = [[number] for number in range(300_000)]
    finally:
        gc.callbacks.remove(begun)
    assert len(kept) == 300_000
    assert 1 <= seldom <= 2 < len(starts) - seldom
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), collected_seldom():
        raise KeyError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("threshold", [0, 300_000])
def test_a_program_that_wants_still_fewer_collections_keeps_its_thresholds(threshold: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(threshold, 5, 5)
    try:
        with collected_seldom():
            assert gc.get_threshold() == (threshold, 5, 5)
        assert gc.get_threshold() == (threshold, 5, 5)
    finally:
        gc.set_threshold(*before)
