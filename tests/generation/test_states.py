"""Layers that carry a state: the same answers, to the bit, whatever runs beside them, whenever."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.engine.forward import response_logprobs
from tandem.generation import blocks
from tandem.generation.blocks import affordable_blocks, affordable_slots, state_bytes
from tandem.generation.generator import generate
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.limits import rows_together
from tandem.generation.request import Request
from tandem.generation.sampler import Sampler, sequence_key
from tandem.generation.session import Session
from tandem.models.load import new_causal_lm
from tandem.models.twin import kv_shapes
from tandem.ops import native
from tandem.ops.attention_context import LayerShape, StateShape
from tests.generation.cuda_stand_ins import stand_in
from tests.generation.rollouts import (
    CPU,
    LENGTHS,
    SCHEDULES,
    STOPS,
    assert_same,
    bitwise,
    prompts,
    rollout_of,
)
from tests.models.families import config_of, perturbed
from tests.models.hybrid_families import HYBRIDS


@cache
def hybrid(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With room for long answers."""
    config = config_of(family, **HYBRIDS[family] | {"max_position_embeddings": 256})
    return perturbed(new_causal_lm(config, seed=3)).to(dtype).eval()


# A delta net, Mamba 2 and nothing else, Mamba 2 between attention.
@bitwise
@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "bamba"])
def test_no_schedule_changes_a_bit(family: str, how: str) -> None:
    model = hybrid(family)
    assert_same(rollout_of(model, LENGTHS), rollout_of(model, LENGTHS, **SCHEDULES[how]))


@bitwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "bamba"])
def test_the_numbers_are_the_training_forwards_to_the_bit(family: str, dtype: torch.dtype) -> None:
    """Whose rows share their prompts, too."""
    model = hybrid(family, dtype)
    rollout = rollout_of(model, LENGTHS, batch_size=5)
    mask = rollout.batch.response_mask
    scored, _ = response_logprobs(model, rollout.batch)
    assert torch.equal(rollout.rollout_logprobs[mask], scored[mask])
    assert scored.requires_grad


def test_the_plain_torch_paths_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, knobs = hybrid("qwen3_5_text"), {"temperature": 1e-3}
    first = rollout_of(model, LENGTHS, sampling=knobs)
    monkeypatch.setattr(native, "available", lambda: False)
    for how in ({"batch_size": 4}, SCHEDULES["parts beside decoding"]):
        assert rollout_of(model, LENGTHS, sampling=knobs, **how).responses == first.responses


@bitwise
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_recorded_steps_replay_the_states(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In padded batches, with stand-ins for CUDA's graphs."""
    model = hybrid(family)
    plain = rollout_of(model, LENGTHS, batch_size=5)
    stand_in(monkeypatch)
    made: list[GraphRunner] = []

    def recorded(m: PreTrainedModel, memory: object, longest: int) -> GraphRunner:
        made.append(GraphRunner(m, memory))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr("tandem.generation.session.make_runner", recorded)
    for _ in range(2):  # over other memory
        assert_same(rollout_of(model, LENGTHS, batch_size=5), plain)
    assert len(made) == 2
    assert not made[0]._kept.recorder.refused


@pytest.mark.parametrize("late", [False, True])
def test_slots_are_free_again_when_answers_end_or_are_cancelled(late: bool) -> None:
    model = hybrid("bamba")
    sampler = Sampler(SamplingConfig(), STOPS.stop_token_ids, CPU, 99)
    session = Session(
        model, STOPS.stop_token_ids, slots=3, num_blocks=40, table_width=4, refill=1, late=late
    )
    states = session._scheduler._states
    assert states is not None
    assert states.num_free == 4
    requests = [
        [Request(3 * i + n, row.token_ids, sequence_key(1, 1, i, n), sampler, 12) for n in range(3)]
        for i, row in enumerate(prompts(9, 20, 4, 17))
    ]
    for group in requests:
        session.submit(group)
    session.step()
    assert states.num_free == 1  # three rows; the prompt's own went to its last sample
    live = [request for group in requests for request in group if request.row >= 0]
    assert len({request.state for request in live}) == 3
    session.cancel(live[0])
    assert states.num_free == 2
    session.cancel(requests[-1][1])  # it waits
    while session.busy:
        session.step()
    assert states.num_free == 4
    assert session.num_free_blocks == 40
    session.close()
    assert session._memory.states == []


def test_samples_go_on_whose_last_one_is_cancelled_while_their_prompt_runs() -> None:
    """Two have come in and wait for a prompt that runs in parts; the third waits for a row."""
    model = hybrid("bamba")
    sampler = Sampler(SamplingConfig(), STOPS.stop_token_ids, CPU, 99)

    def answers(*, cancelled: bool) -> dict[int, list[int]]:
        session = Session(
            model, STOPS.stop_token_ids, slots=3, num_blocks=60, table_width=10, refill=1,
            chunk_tokens=16,
        )  # fmt: skip
        said: dict[int, list[int]] = {}

        def step() -> None:
            for drawn in session.step():
                for request, token in zip(drawn.requests, drawn.token_ids, strict=True):
                    said.setdefault(request.number, []).append(token)

        rows = prompts(9, 70, 20)
        for place, (samples, limit) in enumerate(((1, 30), (3, 12), (1, 12))):
            requests = [
                Request(
                    10 * place + n,
                    rows[place].token_ids,
                    sequence_key(1, 1, place, n),
                    sampler,
                    limit,
                )
                for n in range(samples)
            ]
            session.submit(requests)
            step()
            if place == 1 and cancelled:
                assert [group.computed for group in session._prompts.groups] == [16]
                assert [entry.request for entry in session._entries] == requests[:2]
                session.cancel(requests[2])
        while session.busy:
            step()
        states = session._scheduler._states
        assert states is not None
        assert (states.num_free, session.num_free_blocks) == (4, 60)
        session.close()
        return said

    left, whole = answers(cancelled=True), answers(cancelled=False)
    assert whole.pop(12)
    assert left == whole


@bitwise
def test_factors_in_float32_leave_the_type_of_the_weights() -> None:
    """Falcon H1's are a buffer, which loading in bf16 leaves as it is."""
    model = hybrid("falcon_h1", torch.bfloat16)
    for module in model.modules():
        if "mup_vector" in module._buffers:
            module.mup_vector = module.mup_vector.float()
    rollout = rollout_of(model, LENGTHS, batch_size=5)
    mask = rollout.batch.response_mask
    scored, _ = response_logprobs(model, rollout.batch)
    apart = (rollout.rollout_logprobs - scored.detach())[mask].abs()
    assert float(apart.max()) < 0.1


def test_an_answer_is_drawn_from_its_own_state_beside_others() -> None:
    model, sampling = hybrid("falcon_h1"), SamplingConfig(max_new_tokens=20, top_k=1)
    rows = prompts(*LENGTHS)
    together = generate(model, rows, sampling, STOPS, batch_size=4)
    for i, row in enumerate(rows):
        [alone] = generate(model, [row], sampling, STOPS).responses
        assert together.responses[i] == alone


def test_states_are_counted_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("bamba")
    each = state_bytes(kv_shapes(model), torch.float32)
    # Two layers: 3 inputs of 64 + 2 * 8 channels; 4 heads of 8 by 16.
    assert each == 2 * 4 * (3 * 80 + 4 * 8 * 16)
    assert state_bytes([LayerShape(2, 4, 4)], torch.float32) == 0
    monkeypatch.setattr(blocks, "free_bytes", lambda device: 40 * each)
    assert affordable_slots(64, each, CPU) == 10  # half of the half that KV memory may take
    assert affordable_slots(4, each, CPU) == 4
    assert affordable_slots(64, 0, CPU) == 64
    assert affordable_slots(64, 1000 * each, CPU) == 1
    assert rows_together(model, 64) == 10
    assert rows_together(model, 64, 20 * each) == 5
    shapes, kind = [LayerShape(1, 8, 8, StateShape((3, 80)))], torch.float32
    room = 100 * 16 * 16 * 4
    for slots, expected in ((0, 50), (10, (room // 2 - 10 * 960) // 1024)):
        found = affordable_blocks(
            shapes, needed=1000, largest=1, dtype=kind, device=CPU, free=room, slots=slots
        )
        assert found == expected
    alone = [LayerShape(state=StateShape((3, 80)))]  # nothing is kept of a token
    assert affordable_blocks(alone, needed=7, largest=3, dtype=kind, device=CPU, free=room) == 7
