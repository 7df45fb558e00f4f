"""Tests of which `make test` runs only some cases, or none; all run with `make test-slow`.

Each case left out takes seconds. Where some are kept, they walk the code that the others walk too.
Where none is, the test puts together what other tests show in parts (a whole run over ranks, in
half precision, until it has learned, stopped and continued with what another algorithm keeps), or
it compiles for it, or measures a process. What is slow for a reason of its own is marked so where
it stands. Whoever changes what such a test is about runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

KEPT: Mapping[str, tuple[str, ...]] = {
    # A run of each kind, not by each algorithm.
    "training/test_keep_best.py::test_every_stage_leaves_the_models_of_one_step": (
        "dpo-changes1", "grpo-changes4",
    ),
    "training/test_keep_best.py::test_a_run_that_was_killed_leaves_the_same": (
        "before the first save, before the best, after it",
    ),
    "training/test_reference_model.py::test_the_model_that_the_stage_begins_with_changes_nothing_"
    "and_another_does": ("2-ppo",),
    "training/test_export.py::test_after_the_last_step_they_are_the_files_that_the_stage_leaves": (
        "ppo-changes2",
    ),
    "training/test_grpo.py::test_ranks_have_the_statistics_of_one_process": (),
    "training/test_grpo.py::test_every_preset_trains_with_the_models_that_it_needs_alone": (
        "dapo", "rloo", "reinforce++-baseline", "cispo",
    ),
    "training/test_preferences.py::test_a_loss_by_name_trains_and_a_reference_is_loaded_only_"
    "where_it_is_read": ("ipo", "orpo", "robust"),
    "training/test_replay.py::test_a_step_comes_out_as_recorded_and_nothing_is_touched": (
        "ppo-1", "reward-3", "sft-2",
    ),
    "training/test_flops.py::test_a_ppo_step_counts_what_it_computes": (
        "0.0-sampler", "0.5-forward",
    ),
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
    "training/test_begun_update.py::test_nothing_is_kept_where_the_update_cannot_read_it": (
        "{'parallel__offload': ['params']}", "{'kept_states': 1e-12}", "{'lora__rank': 4}",
        "{'ppo__critic_warmup_steps': 9}",
    ),
    "training/test_begun_update.py::test_a_gradient_that_somebody_touched_is_made_again": (
        "weights", "forget",
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
    "training/test_frozen.py::test_all_steps_over_ranks_are_those_of_one": ("int8-2-3",),
    "training/test_zeropp.py::test_all_steps_run_under_all_of_it": (),
    "training/test_conversations.py::test_ranks_have_the_conversations_of_one": ("3",),
    "training/test_offload.py::test_offload_at_one_process_changes_no_number": ("offload3-2",),
    "training/test_conversations.py::test_a_run_stopped_in_the_middle_is_the_same_run_and_"
    "replays": (),
    "training/test_keep_best.py::test_ranks_keep_the_same_step_and_continue_on_other_numbers_and_"
    "nodes": (),
    "training/test_resume.py::test_a_stop_after_the_last_save_measures_nothing_twice": (),
    "training/test_frozen.py::test_a_stopped_run_goes_on_from_its_adapters": (),
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
    "engine/test_half.py::test_every_layout_starts_alike_and_trains_alike": (
        "1-0-offload0-fp16", "1-0-offload2-bf16", "2-0-offload3-bf16", "2-1-offload4-fp16",
        "2-2-offload5-fp16", "2-3-offload6-bf16",
    ),
    "engine/test_shared_prompts.py::test_any_ranks_and_micro_batches_give_the_unshared_numbers": (
        "30-1-0", "500-2-2", "30-2-3",
    ),
    "engine/test_zeropp_roles.py::test_sampler_training_and_frozen_roles_see_the_same_weights": (),
    "parallel/test_moments.py::test_every_stage_trains_alike": ("0", "3"),
    "engine/test_moving_reference.py::test_a_reference_that_becomes_the_policy_computes_with_its_"
    "bits": (
        "1-0-offload0-more0-bf16", "1-0-offload1-more1-fp32", "1-0-offload2-more2-bf16",
        "2-1-offload4-more4-bf16", "2-2-offload5-more5-fp32", "2-3-offload7-more7-bf16",
    ),
    "engine/test_moving_reference.py::test_a_second_copy_of_the_pieces_within_a_node_is_not_read_"
    "on": (),
    "engine/test_moving_reference.py::test_adapters_become_the_reference_s_own": (
        "1-0-fp32", "2-3-bf16",
    ),
    "engine/test_moving_reference.py::test_a_mixture_is_that_of_a_slow_loop_in_float64": (
        "1-0-offload0-bf16", "1-0-offload1-fp32", "2-1-offload2-fp32", "2-3-offload3-bf16",
    ),
    "training/test_moving_reference.py::test_rl_is_compared_with_the_mixture_of_plain_weights": (
        "ppo-3-1.0", "grpo-1-0.3",
    ),
    "training/test_moving_reference.py::test_implicit_rewards_begin_again_at_0_and_held_out_ones_"
    "do_not": ("0-kto", "2-dpo"),
    "training/test_moving_reference.py::test_two_ranks_at_stage_3_measure_what_one_does": ("grpo",),
    "training/test_moving_reference.py::test_a_stopped_run_continues_to_the_same_bits": (
        "dpo-1.0-more1", "kto-0.3-more2", "grpo-0.3-more3",
    ),
    "training/test_moving_reference.py::test_what_two_ranks_saved_continues_alone": (
        "1-0.3", "3-1.0",
    ),
    "engine/test_half.py::test_real_vocabularies_start_alike_and_train_alike": ("50257",),
    "engine/test_placement.py::test_every_family_is_split_alike": ("gpt2", "gemma2"),
    "engine/test_placement.py::test_four_ranks_train_a_critic_as_one": ("3",),
    "engine/test_placement.py::test_four_ranks_in_two_replicas_train_as_one": ("1-0", "3-2"),
    "engine/test_placement.py::test_two_ranks_train_as_one": ("0-2", "2-0", "2-3"),
    "engine/test_sliced.py::test_two_slices_say_what_the_whole_says": ("llama-2-2", "gemma2-3-2"),
    "engine/test_sliced_families.py::test_key_heads_that_several_ranks_read": (
        "llama-changes3-3-4-2",
    ),
    "engine/test_sliced_families.py::test_fused_weights_are_divided_part_by_part": (
        "gpt2-changes1-2-2-2", "gpt_bigcode-changes4-2-2-2", "phi3-changes7-0-2-0",
        "glm-changes8-2-2-2",
    ),
    "engine/test_sliced_families.py::test_slices_of_integers_are_integers": (
        "gpt2-changes3-3-2-nf4",
    ),
    # Every optimizer: at stages 0 and 3 in the test beside it.
    "engine/test_unused_weights.py::test_a_weight_without_gradient_stays_at_every_stage": (
        "torch's own", "8-bit moments",
    ),
    "plan/test_memory.py::test_a_policy_in_slices_is_loaded_without_being_whole": (
        "4-2-4", "2-2-1",
    ),
    # Memory, measured in processes of their own.
    "engine/test_allocator.py::test_freed_blocks_are_used_again": (),
    "training/test_memory_flat.py::test_thirty_steps_hold_what_ten_did": (),
    "generation/test_laying_out.py::test_what_was_freed_leaves_the_process": (),
    "bench/test_memory.py::test_a_case_holds_at_least_what_it_trains": (),
    "bench/test_serve.py::test_the_command_measures_pauses": (),
    "predict/test_gpu_activations.py::test_a_gpu_keeps_what_the_formula_says": (
        "llama-7b-False-0", "opt-13b-False-0", "llama-3-8b-True-8",
    ),
    "predict/test_pair_memory.py::test_a_step_on_pairs_holds_what_the_formula_says": (
        "micro_batches1-llama", "micro_batches4-llama", "micro_batches0-opt", "micro_batches4-opt",
    ),
    # Benches: that both sides are alike, by one knob of each kind.
    "bench/test_commands.py::test_the_command_prints_a_table_and_writes_json": (
        "generation", "packed",
    ),
    "bench/test_step3.py::test_a_plain_loop_with_another_knob_does_not_agree": (
        "kl_coef-0.5-advantages", "value_clip-0.001-value_loss", "clip_ratio-0.001-policy_loss",
    ),
    "test_smollm2_example.py::test_hh_places_every_policy_on_the_plane_of_reward_and_kl": (),
    # Stops, kills and hostile functions.
    "battery/test_kills.py::test_a_killed_run_is_the_run_that_was_not": ("stages0-bf16-3",),
    "battery/test_stops.py::test_a_stopped_run_is_the_run_that_was_not": (),
    "battery/test_save_faults.py::test_the_old_or_the_new_is_there_whichever_call_it_was": (
        "a checkpoint, killed",
    ),
    "battery/test_full_disk.py::test_a_run_whose_disk_is_full_goes_on_with_more_room": (),
    "training/test_stage_loop.py::test_a_signal_while_modules_are_imported_is_one_line": (
        "transformers", "yaml",
    ),
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
        "qwen3_5_text-late refill", "qwen3_5_text-no sharing",
        "mamba2-parts beside decoding", "bamba-prompts one by one",
    ),
    "generation/test_states.py::test_the_numbers_are_the_training_forwards_to_the_bit": (
        "qwen3_5_text-dtype1", "olmo_hybrid-dtype0", "bamba-dtype0",
    ),
    "generation/test_snapshots.py::test_whatever_comes_each_answer_is_the_one_it_has_alone": (
        "bamba-0", "bamba-3", "qwen3_5_text-1",
    ),
    "generation/test_snapshots.py::test_prompts_that_begin_alike_are_answered_alike": (
        "how0-ran0-bamba", "how0-ran0-lfm2", "how1-None-mamba2", "how1-None-qwen3_5_text",
    ),
    # Families and schedules: each family once, and each schedule.
    "generation/test_session.py::test_no_schedule_changes_a_bit": (
        "llama-*", "opt-three rows", "gpt2-three rows",
        "gemma2-parts beside decoding", "gemma2-prompts one by one",
    ),
    "generation/test_session.py::test_running_to_the_end_draws_what_single_steps_draw": (
        "how0-dtype0-*", "how1-dtype1-llama", "how2-dtype1-gpt2", "how3-dtype0-llama",
        "how4-dtype0-gpt2", "how5-dtype1-llama", "how6-dtype1-gpt2",
    ),
    "generation/test_prefixes.py::test_prompts_that_begin_alike_are_answered_alike": (
        "how0-gemma2", "how0-opt", "how0-llama", "how1-gpt2", "how1-qwen3",
    ),
    "generation/test_laying_out.py::test_families_without_a_decoder_of_one_call_keep_their_bits_"
    "too": (
        "True-dtype1-longcat_flash", "True-dtype0-gemma2", "False-dtype0-qwen3_5_text",
        "False-dtype1-opt", "False-dtype1-gemma2",
    ),
    "generation/test_exactness.py::test_one_call_computes_adapters_and_quantized_weights_as_the_"
    "modules_do": (
        "dtype0-llama-*", "dtype1-qwen2-nf4 and all", "dtype1-qwen2-int8", "dtype1-qwen2-off",
        "dtype1-llama-some",
    ),
    "generation/test_gpu_runner.py::test_a_whole_generation_is_the_plain_runners": (
        "llama-alone-late", "llama-short of memory-at once", "gemma2-three rows-late",
        "gemma2-all at once-at once", "opt-all at once-late", "opt-short of memory-late",
    ),
    "generation/test_gpu_runner.py::test_no_step_of_any_family_waits_for_the_host": (
        "llama", "gemma2", "gpt2",
    ),
    "models/test_shared.py::test_four_roles_on_one_base": (
        "llama-None", "qwen3-None", "gemma2-int8", "opt-int8", "gpt2-nf4",
    ),
    "models/test_frozen.py::test_saved_in_full": (
        "llama-0-int8", "llama-3-nf4", "gpt2-3-int8", "gemma2-0-nf4", "opt-3-nf4", "qwen3-3-int8",
        "gpt_neox-0-int8",
    ),
    "models/test_frozen.py::test_one_copy_trains_and_generates": (
        "llama-dtype0-nf4", "gpt2-dtype1-int8", "gemma2-dtype1-nf4",
    ),
    "models/test_frozen.py::test_forward_and_gradients_are_those_of_the_weights_it_stands_for": (
        "llama-int8", "gpt2-nf4", "gemma2-nf4", "bloom-int8", "opt-nf4", "qwen3-int8",
    ),
    "models/test_frozen.py::test_adapters_may_come_before_or_after": (
        "llama-nf4", "gpt2-int8", "gemma2-nf4", "opt-nf4", "qwen3-int8",
    ),
    "models/test_packed.py::test_what_nobody_asks_for_is_left_out": (
        "llama-*", "gpt2-layers-last_states", "gemma2-attention-predictor_states",
        "gpt_neox-mlp-last_states", "opt-None-predictor_states",
    ),
    "models/test_save.py::test_names_and_numbers_are_hugging_faces": (
        "llama-True", "gpt2-True", "gemma2-False", "opt-True", "gpt_neox-False", "qwen3-False",
        "mistral-True",
    ),
    "models/test_text_families.py::test_the_decoder_is_loaded_as_the_family_it_equals": (
        "qwen2_vl", "mllama", "emu3", "qwen3_omni_moe_thinker", "glm4v_moe", "granite_docling",
    ),
    "ops/test_layer.py::test_the_number_of_threads_does_not_matter": (
        "small-dtype0-adapted after", "small-dtype1-after", "large-dtype1-before",
        "grouped-dtype0-after", "grouped-dtype1-adapted before",
    ),
    # Tokenizers: one of each kind.
    "data/test_render.py::test_text_never_becomes_a_control_token": (
        "tokenizers/smollm2", "models/stories260K/hf", "byte_level_default", "llama2_always",
        "sentencepiece_default",
    ),
    "data/test_render.py::test_decoding_an_answer": (
        "tokenizers/smollm2-*", "byte_level_default-*", "opt_style-*", "folding_default-*",
        "llama2_always-*", "sentencepiece_default-*",
    ),
    "models/test_hybrids.py::test_families_of_each_kind_are_exact": ("falcon_h1", "minimax"),
    # What is compiled, or simulated, for the sake of the test.
    "ops/test_variants.py::test_without_a_matrix_unit_products_do_not_use_one": (),
    "gpu/test_simulated.py::test_a_run_on_a_gpu_computes_what_it_does_on_a_cpu": (),
}  # fmt: skip
"""Test, by its file in tests/ -> the ids of the cases that are kept; "a-*" is all that begin so."""


def mark_slow(items: Iterable[pytest.Item], *, are_whole_files: bool) -> None:
    """Mark the cases that are not kept as slow.

    Args:
        are_whole_files: every case of a test is there, if one is.
    Raises:
        pytest.UsageError: a kept case is not there, or is slow where it stands; correct its id.
    """
    found: dict[str, set[str]] = {}
    files: set[str] = set()
    for item in items:
        files.add(item.nodeid.removeprefix("tests/").partition("::")[0])
        name, _, case = item.nodeid.removeprefix("tests/").partition("[")
        kept = KEPT.get(name)
        if kept is None:
            continue
        matched = {asked for asked in kept if _fits(asked, case.removesuffix("]"))}
        if item.get_closest_marker("slow"):  # where it stands
            matched = set()
        found.setdefault(name, set()).update(matched)
        if not matched:
            item.add_marker(pytest.mark.slow)
    for name, kept in KEPT.items() if are_whole_files else ():
        missing = sorted(set(kept) - found.get(name, set()))
        if name.partition("::")[0] in files and (missing or name not in found):
            what = f"{missing[0]!r} of " if missing else ""
            raise pytest.UsageError(
                f"tests/slow_cases.py names {what}{name}; got no such test, or a slow one"
            )


def _fits(asked: str, case: str) -> bool:
    return case.startswith(asked[:-1]) if asked.endswith("-*") else case == asked
