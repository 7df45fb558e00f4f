"""Tiny configs of families with states, convolutions, or layers that share keys and values."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .families import LLAMA, TOKEN_IDS, config_of

_TEXT = TOKEN_IDS | LLAMA
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
}
_GEMMA = _TEXT | {
    "tie_word_embeddings": True,
    "sliding_window": 4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
    "final_logit_softcapping": 30.0,
}
_DELTA = _TEXT | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = _TEXT | {
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_LATENT = (
    _TEXT
    | _MOE
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
)
_STATES = TOKEN_IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LATENT
    | {"q_lora_rank": 16, "n_group": 1, "topk_group": 1, "head_dim": 16, "qk_head_dim": 16},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
    "falcon_mamba": _STATES,
    "gemma3n_text": _GEMMA
    | {
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.95] + [0.0] * 5,
        "intermediate_size": [48] * 6,
    },
    "gemma4_text": _GEMMA
    | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "global_head_dim": 16},
    "gemma4_unified_text": _GEMMA | {"num_kv_shared_layers": 3, "global_head_dim": 16},
    "granitemoehybrid": _MAMBA2 | _MOE | {"layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": _LATENT | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": _TEXT | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": _TEXT
    | _MOE
    | {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
        "use_expert_bias": True,
    },
    "lfm3": _TEXT | _MOE | {"num_hidden_layers": 4, "num_dense_layers": 1},
    "longcat_flash": _TEXT
    | {
        "num_layers": 2,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "mamba2": _STATES | {"head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": _TEXT
    | _MOE
    | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "ministral3": _TEXT
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "nemotron_h": _TEXT
    | {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-*E",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4},
    "qwen3_5_moe_text": _DELTA | _MOE,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _MOE,
    "qwen4_exp_text": _DELTA
    | _MOE
    | {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 128,
        "heads_per_ngram": 2,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 2,
    },
    "recurrent_gemma": TOKEN_IDS
    | {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "xlstm": TOKEN_IDS
    | {
        "hidden_size": 128,
        "embedding_dim": 128,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_blocks": 2,
        "chunk_size": 16,
    },
    "zamba": _TEXT
    | {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zamba2": _TEXT
    | {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "hybrid", "mamba"] * 2,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "use_mem_rope": True,
    },
    "zaya": _TEXT
    | _MOE
    | {"num_hidden_layers": 4, "num_experts_per_tok": 1, "router_hidden_size": 16},
}
PACKED = {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "longcat_flash",
    "ministral3",
}


def hybrid_config(family: str) -> PreTrainedConfig:
    """A new config of the family."""
    return config_of(family, **HYBRIDS[family])
