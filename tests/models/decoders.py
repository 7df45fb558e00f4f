"""Tiny configurations of the decoders that transformers has, one attention kind of each at least.

`test_decoders` runs them all. Widths are as small as each family allows, while what its code does
only past some length (windows, chosen keys) begins after a few tokens.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .families import LLAMA, OPT, TOKEN_IDS, config_of

_FOUR = LLAMA | {"num_hidden_layers": 4}
_MIXED = _FOUR | {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_LATENT = {
    **{name: LLAMA[name] for name in LLAMA if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 16}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
_TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

_OPTIONS: dict[str, dict[str, Any]] = {
    # Families with text alone that transformers 5.23 lists, by name.
    "afmoe": _MIXED | _EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": LLAMA,
    "apertus default rope": LLAMA
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "arcee": LLAMA,
    "aria_text": LLAMA | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": _LATENT | _EXPERTS | _GROUPS | _DENSE_FIRST,
    "axk2": _LATENT | _EXPERTS | _GROUPS | _DENSE_FIRST | _INDEXED | {"gated_norm_rank": 4},
    "beam": _MIXED
    | _EXPERTS
    | _GROUPS
    | {
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    },
    "biogpt": {k: v for k, v in LLAMA.items() if k != "head_dim"},
    "bitnet": LLAMA,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "codegen": _GPT | {"rotary_dim": 4},
    "cohere": LLAMA | {"logit_scale": 0.3},
    "cohere qk": LLAMA | {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": _MIXED | {"logit_scale": 0.3},
    "cohere2_moe": _MIXED | _EXPERTS | {"num_shared_experts": 1, "logit_scale": 0.3},
    "cohere2_moe dense": _MIXED
    | _EXPERTS
    | {"mlp_layer_types": ["dense", "sparse"] * 2, "prefix_dense_intermediate_size": 24},
    "ctrl": _GPT | {"dff": 48},
    "cwm": _MIXED,
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 24,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": _LATENT | _EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": _LATENT | _EXPERTS | _GROUPS | {"first_k_dense_replace": 1},
    "deepseek_v32": _LATENT | _EXPERTS | _GROUPS | _DENSE_FIRST | _INDEXED,
    "deepseek_v4": _FOUR
    | _EXPERTS
    | _INDEXED
    | {
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "n_shared_experts": 1,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "hc_mult": 2,
        "sliding_window": 5,
        "o_groups": 2,
        "o_lora_rank": 8,
        "num_nextn_predict_layers": 0,
    },
    "diffllama": LLAMA,
    "doge": LLAMA | {"keep_window_size": 64, "num_experts": 4},
    "dots1": LLAMA | _EXPERTS | _GROUPS | {"first_k_dense_replace": 1},
    "dots3_note_text": _LATENT
    | _EXPERTS
    | _GROUPS
    | _INDEXED
    | {
        "head_dim": 12,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "sliding_window": 5,
        "shared_experts_intermediate_size": 16,
        "per_layer_config": {},
    }
    | _DENSE_FIRST,
    "ernie4_5": LLAMA,
    "ernie4_5_moe": _FOUR
    | {
        "moe_intermediate_size": 16,
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_layer_end_index": 3,
    },
    "exaone4": _MIXED,
    "exaone_moe": _MIXED
    | _EXPERTS
    | _GROUPS
    | {"mlp_layer_types": ["dense", "sparse"] * 2, "num_shared_experts": 1},
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
    },
    "flex_olmo": LLAMA | _EXPERTS,
    "flint": _MIXED
    | _EXPERTS
    | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    "gemma": LLAMA | {"tie_word_embeddings": True},
    "gemma2": _MIXED
    | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": _MIXED | {"tie_word_embeddings": True, "query_pre_attn_scalar": 8},
    "glm": LLAMA,
    "glm4": LLAMA,
    "glm4_moe": LLAMA | _EXPERTS | _GROUPS | {"first_k_dense_replace": 1},
    "glm4_moe qk": LLAMA | _EXPERTS | _GROUPS | {"use_qk_norm": True},
    "glm4_moe_lite": _LATENT | _EXPERTS | _GROUPS | _DENSE_FIRST,
    "glm_moe_dsa": _LATENT
    | _EXPERTS
    | _GROUPS
    | _DENSE_FIRST
    | _INDEXED
    | {"indexer_types": ["full", "shared"]},
    "gpt-sw3": _GPT,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_bigcode heads": _GPT | {"multi_query": False},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 64,
        "intermediate_size": 48,
        "initializer_range": 0.2,
    },
    "gpt_neox": {k: v for k, v in LLAMA.items() if k != "head_dim"},
    "gpt_neox_japanese": LLAMA | {"intermediate_multiple_size": 2},
    "gpt_oss": _MIXED | _EXPERTS,
    "gptj": _GPT | {"rotary_dim": 4},
    "granite": LLAMA | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "granite_swa": _MIXED
    | {
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "layer_rope_theta": [1e4, 5e2, 1e4, 5e2],
    },
    "granitemoe": LLAMA | _EXPERTS,
    "granitemoe_swa": _MIXED
    | _EXPERTS
    | {"shared_intermediate_size": 16, "layer_rope_theta": [1e4, 5e2, 1e4, 5e2]},
    "granitemoeshared": LLAMA | _EXPERTS | {"shared_intermediate_size": 16},
    "helium": LLAMA,
    "hrm_text": LLAMA
    | {
        "num_key_value_heads": 4,
        "num_layers_per_stack": 2,
        "H_cycles": 2,
        "L_cycles": 1,
        "num_hidden_layers": 8,
    },
    "hrm_text causal": LLAMA
    | {
        "num_key_value_heads": 4,
        "num_layers_per_stack": 2,
        "H_cycles": 2,
        "L_cycles": 1,
        "num_hidden_layers": 8,
        "prefix_lm": False,
    },
    "hunyuan_v1_dense": LLAMA,
    "hunyuan_v1_moe": LLAMA | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": LLAMA | _EXPERTS | _DENSE_FIRST | {"num_shared_experts": 1},
    "hy_v4": _LATENT
    | _EXPERTS
    | _GROUPS
    | _DENSE_FIRST
    | _INDEXED
    | {"hc_mult": 2, "indexer_types": ["full", "shared"], "head_dim": 4},
    "hyperclovax": LLAMA | {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "hyperclovax pre-norm": LLAMA | {"use_post_norm": False},
    "inkling2_text": _FOUR
    | _EXPERTS
    | {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 5,
        "d_rel": 4,
        "rel_extent": 16,
        "n_layers_per_attn_res_block": 2,
        "unpadded_vocab_size": 99,
    },
    "inkling_text": _FOUR
    | _EXPERTS
    | {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 5,
        "d_rel": 4,
        "rel_extent": 16,
        "n_shared_experts": 1,
    },
    "internlm3": LLAMA,
    "iquestcoder": LLAMA,
    "jais2": LLAMA,
    "jetmoe": LLAMA | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "kolibri1": _MIXED | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "laguna": _MIXED
    | _EXPERTS
    | {
        "rope_parameters": _TWO_ROPES,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads_per_layer": [4, 8, 4, 8],
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "llama": LLAMA,
    "llama biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "longcat_flash": {
        **{k: v for k, v in _LATENT.items() if k != "num_hidden_layers"},
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "head_dim": 4,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 16,
        "routed_scaling_factor": 1.5,
    },
    "mellum": _MIXED
    | _EXPERTS
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "mimo_v2_flash": _MIXED
    | _EXPERTS
    | _GROUPS
    | {
        "rope_parameters": _TWO_ROPES,
        "v_head_dim": 4,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "minicpm3": _LATENT | {"scale_emb": 3, "dim_model_base": 16, "head_dim": 4},
    "minimax_m2": LLAMA | _EXPERTS,
    "minimax_m3_vl_text": LLAMA
    | _EXPERTS
    | _DENSE_FIRST
    | {
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
        "rotary_dim": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "ministral": _MIXED,
    "ministral3": LLAMA,
    "ministral3 scaled": LLAMA
    | {
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral": LLAMA | {"sliding_window": 5},
    "mixtral": LLAMA | _EXPERTS | {"sliding_window": 5},
    "modernbert-decoder": {
        **{k: v for k, v in _MIXED.items() if k not in ("head_dim", "num_key_value_heads")},
        "local_attention": 8,
    },
    "mpt": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "initializer_range": 0.2,
    },
    "nanochat": LLAMA,
    "nemotron": LLAMA,
    "olmo": LLAMA | {"clip_qkv": 2.0},
    "olmo2": LLAMA,
    "olmo3": _MIXED,
    "olmoe": LLAMA | _EXPERTS,
    "openai-gpt": _GPT,
    "opt": OPT,
    "persimmon": {k: v for k, v in LLAMA.items() if k != "head_dim"},
    "phi": LLAMA,
    "phi3": LLAMA | {"sliding_window": 5},
    "phi4_multimodal": LLAMA
    | {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
            "patch_size": 14,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "phimoe": LLAMA | _EXPERTS,
    "qwen2": LLAMA | {"tie_word_embeddings": True},
    "qwen2_moe": LLAMA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": LLAMA,
    "qwen3_moe": LLAMA | _EXPERTS,
    "seed_oss": LLAMA,
    "smollm3": _FOUR | {"no_rope_layers": [1, 0, 1, 0]},
    "solar_open": LLAMA | _EXPERTS | _GROUPS,
    "stablelm": LLAMA,
    "starcoder2": LLAMA | {"sliding_window": 5},
    "vaultgemma": _MIXED
    | {
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    },
    "xglm": {
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 64,
        "init_std": 0.2,
    },
    "youtu": _LATENT | {"pad_token_id": None},
}
DECODERS = sorted(_OPTIONS)
"""Families, some of them with a word behind that tells configurations apart."""
SOME_LAYERS = {
    *("afmoe", "aria_text", "axk1", "beam", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3"),
    *("dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite"),
    *("gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3"),
    *("jetmoe", "kolibri1", "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "minimax_m2"),
    *("mixtral", "modernbert-decoder", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
    "starcoder2",
}
PADDED = {
    *("axk2", "bloom", "codegen", "deepseek_v32", "deepseek_v4", "doge", "dots3_note_text"),
    *("falcon", "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese", "gptj", "hrm_text", "hy_v4"),
    *("inkling2_text", "inkling_text", "minimax_m3_vl_text", "mpt", "openai-gpt", "xglm"),
}
"""Families of the second and third row of docs/models.md's table; all others are of its first."""


def decoder_config(name: str, **changes: Any) -> PreTrainedConfig:
    """A new config of one of `DECODERS`."""
    return config_of(name.split()[0], **(TOKEN_IDS | _OPTIONS[name] | changes))
