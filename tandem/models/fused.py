"""Layers of a twin that run on the operations of `ops`: same weights, same result, fewer passes.

`fused` chooses by class name. Only classes whose code was read and compared are named here; every
other layer runs its own code. `tests/models/test_twin.py` compares each with the original.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.pytorch_utils import Conv1D

from tandem.models.frozen import FrozenConv1D, FrozenLinear
from tandem.models.gpu_blocks import fused_rotary_layer, on_gpu_opt_attention, on_gpu_opt_layer
from tandem.models.lora import LoraLinear
from tandem.models.rope import packed_rope
from tandem.models.token_layers import TokenEmbedding, TokenHead
from tandem.models.twin_layers import (
    TwinAdaptedLinear,
    TwinConv1D,
    TwinDifferentialAttention,
    TwinEmbedding,
    TwinFrozenConv1D,
    TwinFrozenLinear,
    TwinGatedAttention,
    TwinGatedMLP,
    TwinGELU,
    TwinJoinedMLP,
    TwinLayerNorm,
    TwinLinear,
    TwinNumberedMLP,
    TwinRMSNorm,
    TwinRotaryAttention,
    TwinScaledAttention,
    TwinSiLU,
    TwinTokenEmbedding,
    TwinTokenHead,
)
from tandem.models.twin_mixers import (
    MixerSize,
    TwinDeltaNet,
    TwinGroupedDeltaNet,
    TwinMamba2,
    TwinMixer,
    TwinScaledMamba2,
    TwinSeparateDeltaNet,
    TwinShortConv,
)

Fused = tuple[type[nn.Module], dict[str, Any]]
"""A class, and attributes that its forward needs beside those of the layer that it replaces."""


def fused(module: Any, kind: type[nn.Module]) -> Fused:
    """The class that computes a module in a twin: one of `twin_layers`, or its own, `kind`."""
    plain = {
        nn.Linear: TwinLinear,
        nn.LayerNorm: TwinLayerNorm,
        Conv1D: TwinConv1D,
        FrozenLinear: TwinFrozenLinear,
        LoraLinear: TwinAdaptedLinear,
        FrozenConv1D: TwinFrozenConv1D,
        TokenHead: TwinTokenHead,
    }
    if kind in plain:
        return plain[kind], {}
    if kind in (nn.Embedding, TokenEmbedding):
        looks_up = TwinEmbedding if kind is nn.Embedding else TwinTokenEmbedding
        return (looks_up if _only_looks_up(module) else kind), {}
    if kind in _ACTIVATIONS:
        return _activation(module, kind)
    if kind.__module__.startswith("transformers.") and kind.__name__ in _BY_NAME:
        return _BY_NAME[kind.__name__](module, kind)
    return packed_rope(module, kind)


_ACTIVATIONS = (nn.SiLU, SiLUActivation, GELUActivation, GELUTanh)


def _activation(module: Any, kind: type[nn.Module]) -> Fused:
    """Not those in place, nor those that are written out in operations of their own."""
    if kind in (nn.SiLU, SiLUActivation):
        return (kind if getattr(module, "inplace", False) else TwinSiLU), {}
    calls = getattr(module.act, "func", module.act)  # of the tanh GELU, a partial of torch's
    return (TwinGELU if calls is F.gelu else kind), {"_tanh": kind is GELUTanh}


_UNIT_OFFSET = ("Gemma", "VaultGemma", "Qwen3_5", "Qwen3Next")
"""Families whose norms multiply by one plus their weight."""


def _norm(module: Any, kind: type[nn.Module]) -> Fused:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return TwinRMSNorm, {"_eps": eps, "_unit_offset": kind.__name__.startswith(_UNIT_OFFSET)}


def _gated_mlp(module: Any, kind: type[nn.Module]) -> Fused:
    drops = getattr(module, "residual_dropout", 0.0)  # SeedOss
    if drops or not isinstance(module.act_fn, SiLUActivation | GELUTanh | nn.SiLU):
        return kind, {}
    return TwinGatedMLP, {"_tanh": isinstance(module.act_fn, GELUTanh)}


def _joined_mlp(module: Any, kind: type[nn.Module]) -> Fused:
    is_silu = isinstance(module.activation_fn, SiLUActivation | nn.SiLU)
    return (TwinJoinedMLP if is_silu else kind), {}


def _numbered_mlp(module: Any, kind: type[nn.Module]) -> Fused:
    return TwinNumberedMLP, {}


def _attention(module: Any, kind: type[nn.Module]) -> Fused:
    softcap = float(getattr(module, "attn_logit_softcapping", None) or 0.0)
    return TwinRotaryAttention, {"_window": _window(module, kind), "_softcap": softcap}


def _scaled_attention(module: Any, kind: type[nn.Module]) -> Fused:
    parameters = module.config.rope_parameters
    beta = float(parameters.get("llama_4_scaling_beta") or 0.0)
    reached = parameters.get("original_max_position_embeddings")
    return TwinScaledAttention, {
        "_window": _window(module, kind), "_softcap": 0.0, "_beta": beta, "_reached": reached,
    }  # fmt: skip


def _differential_attention(module: Any, kind: type[nn.Module]) -> Fused:
    return TwinDifferentialAttention, {"_window": 0, "_softcap": 0.0}


def _gated_attention(module: Any, kind: type[nn.Module]) -> Fused:
    return TwinGatedAttention, {"_window": 0, "_softcap": 0.0}


def _mixer(to: type[nn.Module]) -> Callable[[Any, type[nn.Module]], Fused]:
    """A layer with a state, where its activation is the one that ours has."""

    def chosen(module: Any, kind: type[nn.Module]) -> Fused:
        is_silu = getattr(module, "activation", "silu") in ("silu", "swish")
        return (to if is_silu else kind), {}

    return chosen


def mixer_size(module: nn.Module) -> MixerSize | None:
    """What a layer with a state keeps, where `fused` replaces it; None for any other module."""
    to, _ = fused(module, type(module))
    return to.size_of(module) if issubclass(to, TwinMixer) else None


def _window(module: Any, kind: type[nn.Module]) -> int:
    """How many keys a layer sees; 0 is all. Mistral's read it from their config at every call."""
    if "sliding_window" in module.__dict__:
        return int(module.sliding_window or 0)
    if kind.__name__ in ("MistralAttention", "MixtralAttention", "Ministral3Attention"):
        return int(getattr(module.config, "sliding_window", None) or 0)
    return 0


def _rotary_layer(module: Any, kind: Any) -> Fused:
    attention = module.self_attn
    is_last = attention.layer_idx == attention.config.num_hidden_layers - 1
    return fused_rotary_layer(kind), {"_is_last": is_last}


def _opt_layer(module: Any, kind: Any) -> Fused:
    return on_gpu_opt_layer(kind), {}


def _opt_attention(module: Any, kind: Any) -> Fused:
    return on_gpu_opt_attention(kind), {}


def _router(module: Any, kind: Any) -> Fused:
    return _steady_router(kind), {}


@cache
def _steady_router(kind: Any) -> type[nn.Module]:
    """A router that samples its experts in training, made to choose as it does in evaluation:
    else the trained policy is not the one that samples."""

    class Steady(kind):
        def forward(self, *args: Any, **keywords: Any) -> Any:
            module: Any = self
            training, module.training = module.training, False
            try:
                return super().forward(*args, **keywords)
            finally:
                module.training = training

    return Steady


def _only_looks_up(embedding: Any) -> bool:
    unscaled = embedding.max_norm is None and not embedding.scale_grad_by_freq
    return unscaled and not embedding.sparse


def _names(families: str, ending: str) -> list[str]:
    return [family + ending for family in families.split()]


_BY_NAME: dict[str, Callable[[Any, type[nn.Module]], Fused]] = {
    **dict.fromkeys(
        _names(
            "Llama Mistral Qwen2 Qwen3 Mixtral Phi3 Olmo2 SmolLM3 Granite Gemma Gemma2 Gemma3 "
            "Apertus Arcee AriaText AXK1 BitNet Cohere2Moe Cwm DeepseekV2 DeepseekV3 DiffLlama "
            "Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Glm Glm4 Glm4Moe Glm4MoeLite "
            "GraniteMoe GraniteMoeShared GraniteMoeSWA GraniteSWA HunYuanDenseV1 HunYuanMoEV1 HYV3 "
            "HyperCLOVAX JetMoe Kolibri1 Laguna LongcatFlash Mellum MiMoV2Flash MiniCPM3 MiniMaxM2 "
            "Ministral Ministral3 Olmoe Phi4Multimodal Qwen2Moe Qwen3Moe SeedOss SolarOpen "
            "VaultGemma Youtu Bamba FalconH1 GraniteMoeHybrid Lfm2 Lfm2Moe OlmoHybrid Qwen3Next "
            "Qwen3_5 Qwen3_5Moe",
            "RMSNorm",
        ),
        _norm,
    ),
    **dict.fromkeys(
        _names(
            "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Granite SmolLM3 "
            "Afmoe AXK1 Cohere Cohere2 Cohere2Moe Cwm DeepseekV2 DeepseekV3 DiffLlama Dots1 "
            "Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Flint Glm4Moe Glm4MoeLite GraniteSWA Helium "
            "HunYuanDenseV1 HunYuanMoEV1 HYV3 HyperCLOVAX Kolibri1 Laguna LongcatFlash Mellum "
            "MiMoV2Flash MiniCPM3 Ministral Ministral3 Olmo Olmo2 Olmo3 Qwen2Moe Qwen3Moe SeedOss "
            "SolarOpen StableLm VaultGemma Youtu Bamba OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe",
            "MLP",
        ),
        _gated_mlp,
    ),
    **dict.fromkeys(_names("Phi3 Phi4Multimodal Glm Glm4", "MLP"), _joined_mlp),
    **dict.fromkeys(_names("Lfm2 Lfm2Moe Lfm3", "MLP"), _numbered_mlp),
    **dict.fromkeys(
        _names(
            "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Granite Arcee AriaText Cwm Dots1 GraniteMoe "
            "GraniteMoeShared HyperCLOVAX Jais2 Mellum Ministral Mixtral Qwen3Moe SolarOpen "
            "VaultGemma",
            "Attention",
        ),
        _attention,
    ),
    "Ministral3Attention": _scaled_attention,
    "DiffLlamaAttention": _differential_attention,
    **dict.fromkeys(_names("Qwen3Next Qwen3_5 Qwen3_5Moe", "Attention"), _gated_attention),
    **dict.fromkeys(_names("Qwen3_5 Qwen3_5Moe", "GatedDeltaNet"), _mixer(TwinDeltaNet)),
    "Qwen3NextGatedDeltaNet": _mixer(TwinGroupedDeltaNet),
    "OlmoHybridGatedDeltaNet": _mixer(TwinSeparateDeltaNet),
    **dict.fromkeys(_names("Lfm2 Lfm2Moe Lfm3", "ShortConv"), _mixer(TwinShortConv)),
    **dict.fromkeys(
        ("BambaMixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "NemotronHMamba2Mixer"),
        _mixer(TwinMamba2),
    ),
    "FalconH1Mixer": _mixer(TwinScaledMamba2),
    **dict.fromkeys(
        _names(
            "Llama Mistral Qwen2 Qwen3 Gemma Arcee Cwm Jais2 Ministral Ministral3", "DecoderLayer"
        ),
        _rotary_layer,
    ),
    "OPTDecoderLayer": _opt_layer,
    "OPTAttention": _opt_attention,
    "PhimoeTopKRouter": _router,
}
