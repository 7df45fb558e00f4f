"""Tests of which `make test` runs only some cases, or none; all run with `make test-slow`.

Each case left out takes seconds. Where some are kept, they walk the code that the others walk too.
Where none is, the test puts together what other tests show in parts (a whole run over ranks, in
half precision, until it has learned), or it compiles for it, or measures a process. What is slow
for a reason of its own is marked so where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

KEPT: Mapping[str, tuple[str, ...]] = {
    # A run by each algorithm: the one with most models, and the one with least.
    "training/test_keep_best.py::test_every_stage_leaves_the_models_of_one_step": (
        "dpo-changes1", "ppo-changes3",
    ),
    "training/test_keep_best.py::test_a_run_that_was_killed_leaves_the_same": (
        "before the first save, before the best, after it",
    ),
    "training/test_reference_model.py::test_the_model_that_the_stage_begins_with_changes_nothing_"
    "and_another_does": ("0-dpo", "2-ppo"),
    "training/test_export.py::test_after_the_last_step_they_are_the_files_that_the_stage_leaves": (
        "ppo-changes2",
    ),
    "training/test_grpo.py::test_ranks_have_the_statistics_of_one_process": ("dapo",),
    "training/test_policy_functions.py::test_functions_that_say_what_the_knobs_say_give_the_same_"
    "weights": ("ppo",),
    "training/test_preferences.py::test_a_gradient_does_not_depend_on_micro_batches_or_ranks": (
        "kto-labelled",
    ),
    "training/test_ppo_trainer.py::test_weights_after_a_step_do_not_depend_on_micro_batches": (
        "loss",
    ),
    "training/test_without_critic.py::test_a_policy_learns_without_critic_and_reference": (),
    "training/test_same.py::test_the_same_seed_is_the_same_run": ("changes2",),
    # An update: plain, in half precision, in parts.
    "training/test_begun_update.py::test_one_update_of_all_answers_is_the_same_with_half_of_the_"
    "critics_forwards": (
        "{'dtype': 'bf16'}", "{'micro_batch_tokens': 64}", "{'lora__rank': 4}",
    ),
    "training/test_begun_update.py::test_the_actors_layers_run_once_for_rollout_and_update": (
        "{'ppo__minibatch_size': 8, 'ppo__epochs': 1, 'dtype': 'bf16', 'micro_batch_tokens': 64}",
        (
            "{'stages': ['grpo'], 'grpo': {'prompts_per_step': 8, 'minibatch_size': 16, "
            "'kl': 'none'}, 'sampling__samples_per_prompt': 2}"
        ),
    ),
    "training/test_begun_update.py::test_several_ranks_make_the_same_update": ("3",),
    "training/test_stage_loop.py::test_a_bad_update_is_left_out_written_down_and_counted": (
        "_inf_gradient-critic", "_nan_loss-sft",
    ),
    "training/test_stage_loop.py::test_bad_experience_is_left_out_before_any_update": ("values",),
    "training/test_stage_loop.py::test_what_is_bad_on_one_rank_is_left_out_on_all": ("3",),
    # Ranks and stages: the most that a case asks for; theirs alone in engine/ and parallel/.
    "training/test_ranks.py::test_all_steps_over_ranks_are_those_of_one": ("3-0-2-2",),
    "training/test_ranks.py::test_a_family_that_hugging_face_answers_for": (),
    "training/test_zeropp.py::test_all_steps_run_under_all_of_it": (),
    "training/test_conversations.py::test_ranks_have_the_conversations_of_one": ("3",),
    "training/test_offload.py::test_offload_at_one_process_changes_no_number": ("offload3-2",),
    "training/test_offload.py::test_a_run_in_fp16_follows_that_in_fp32": (),
    "training/test_sample.py::test_frozen_weights_are_sampled_as_the_run_had_them": ("nf4",),
    "training/test_stage_data.py::test_several_processes_give_the_rows_of_one": (
        "stages2-kinds2",
    ),
    "engine/test_frozen.py::test_ranks_have_the_numbers_of_one": ("2-3-nf4",),
    "engine/test_frozen.py::test_a_shared_base_has_the_numbers_of_separate_ones": (
        "-fp32", "nf4-bf16",
    ),
    "engine/test_frozen.py::test_each_rank_reads_and_quantizes_its_own_rows": (
        "llama-nf4", "gpt2-int8",
    ),
    "engine/test_half.py::test_real_vocabularies_start_alike_and_train_alike": ("50257",),
    "engine/test_placement.py::test_every_family_is_split_alike": ("gpt2", "gemma2"),
    "engine/test_placement.py::test_four_ranks_train_a_critic_as_one": ("3",),
    "engine/test_placement.py::test_four_ranks_in_two_replicas_train_as_one": ("1-0", "3-2"),
    "engine/test_placement.py::test_two_ranks_train_as_one": ("0-2", "2-0", "2-3"),
    "engine/test_sliced.py::test_two_slices_say_what_the_whole_says": ("llama-2-2", "gemma2-3-2"),
    # Memory, measured in processes of their own.
    "engine/test_allocator.py::test_freed_blocks_are_used_again": (),
    "training/test_memory_flat.py::test_thirty_steps_hold_what_ten_did": (),
    "generation/test_laying_out.py::test_what_was_freed_leaves_the_process": (),
    "bench/test_memory.py::test_a_case_holds_at_least_what_it_trains": (),
    "bench/test_serve.py::test_the_command_measures_pauses": (),
    # Stops, kills and hostile functions.
    "battery/test_kills.py::test_a_killed_run_is_the_run_that_was_not": ("stages0-bf16-3",),
    "battery/test_stops.py::test_a_lost_rank_is_named_and_the_run_is_the_run_that_was_not": (),
    "battery/test_hostile_rewards.py::test_one_hostile_answer_among_good_ones": (
        "a loop that catches all", "ever more memory", "a segmentation fault", "a fork bomb",
        "a child in another session", "noise on every descriptor", "a kill of its host",
    ),
    "serve/test_ending.py::test_any_number_of_ctrl_cs_is_one_line": ("page:-pauses1",),
    "rewards/test_selftest.py::test_a_reward_of_form_is_told_in_a_line_whatever_the_order_of_the_"
    "references": ("half",),
    # Layers with states, by schedule.
    "generation/test_states.py::test_no_schedule_changes_a_bit": (
        "qwen3_5_text-late refill", "qwen3_5_text-short of memory", "qwen3_5_text-no sharing",
        "mamba2-parts beside decoding", "bamba-prompts one by one",
    ),
    "models/test_hybrids.py::test_families_of_each_kind_are_exact": ("falcon_h1", "minimax"),
    # What is compiled, or simulated, for the sake of the test.
    "ops/test_variants.py::test_without_a_matrix_unit_products_do_not_use_one": (),
    "gpu/test_simulated.py::test_a_run_on_a_gpu_computes_what_it_does_on_a_cpu": (
        "adapters on nf4, offloaded",
    ),
}  # fmt: skip
"""Test, by its file in tests/ -> the ids of the cases that are kept."""


def mark_slow(items: Iterable[pytest.Item], *, are_whole_files: bool) -> None:
    """Mark the cases that are not kept as slow.

    Args:
        are_whole_files: every case of a test is there, if one is.
    Raises:
        pytest.UsageError: a kept case is not there; correct its id.
    """
    found: dict[str, set[str]] = {}
    files: set[str] = set()
    for item in items:
        files.add(item.nodeid.removeprefix("tests/").partition("::")[0])
        name, _, case = item.nodeid.removeprefix("tests/").partition("[")
        kept = KEPT.get(name)
        if kept is None:
            continue
        found.setdefault(name, set()).add(case.removesuffix("]"))
        if case.removesuffix("]") not in kept:
            item.add_marker(pytest.mark.slow)
    for name, kept in KEPT.items() if are_whole_files else ():
        missing = sorted(set(kept) - found.get(name, set()))
        if name.partition("::")[0] in files and (missing or name not in found):
            what = f"{missing[0]!r} of " if missing else ""
            raise pytest.UsageError(f"tests/slow_cases.py names {what}{name}; got no such test")
