"""A Llama-family folder that Tandem saved, as GGUF for llama.cpp and its kin; then checked.

    pip install gguf
    python examples/to_gguf.py RUN/ppo/actor model.gguf

Weights are written as they are (fp32, fp16, bf16), with the tokenizer (byte-level or SentencePiece
BPE) and its chat template. Then the file is read again: every tensor must equal its source.
llama.cpp's own convert_hf_to_gguf.py knows more families and tokenizers, and quantizes.
"""

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (r"\p{N}{1,3}", "ByteLevel"): "llama-bpe",
    (r"\p{N}", "ByteLevel"): "qwen2",
}
"""llama.cpp's names for how byte-level BPE cuts a text first, by what tokenizer.json says of it."""


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF."""
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".", 3)  # model.layers.3.REST
    if len(parts) < 4 or parts[3] not in NAMES:
        sys.exit(f"the model must have a Llama language model's weights alone; got {name}.")
    return f"blk.{parts[2]}.{NAMES[parts[3]]}"


def for_gguf(name: str, tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbors where Hugging Face rotates halves: rows of q and k are moved."""
    count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
    if count is None:
        return tensor
    rows = tensor.shape[0] // count // 2
    return tensor.view(count, 2, rows, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write the file; returns its tensors by name."""
    if not (folder / "config.json").is_file():
        sys.exit(f"{folder} must be a model's folder, as RUN/ppo/actor is; got no config.json.")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = (config.get("architectures") or [config["model_type"]])[0]
    if kind != "LlamaForCausalLM":
        sys.exit(f"{folder} must be a LlamaForCausalLM; got {kind}.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        sys.exit(f"{folder} must have plain rotary embeddings; got {rope['rope_type']}.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, tokenizer, config["vocab_size"])
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[gguf_name(name)] = for_gguf(name, tensor, heads, kv_heads).contiguous()
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())  # llama.cpp wants norms in fp32
        elif tensor.dtype == torch.bfloat16:
            raw = tensor.view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer, vocabulary: int) -> None:
    """The tokens with their kinds, what makes tokens of a text, and the chat template."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    if spec["model"]["type"] != "BPE":
        sys.exit(f"the tokenizer must be BPE; got {spec['model']['type']}.")
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    special = {added["id"] for added in spec["added_tokens"] if added["special"]}
    added = {added["id"] for added in spec["added_tokens"]} - special
    spaces = json.dumps([spec["normalizer"], spec["pre_tokenizer"]], ensure_ascii=False)
    pieces = "\u2581" in spaces  # SentencePiece's mark of a space
    kinds = []
    for number in range(vocabulary):
        kind = gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
        kind = gguf.TokenType.USER_DEFINED if number in added else kind
        if pieces and by_id.get(number) == spec["model"].get("unk_token"):
            kind = gguf.TokenType.UNKNOWN
        elif pieces and re.fullmatch("<0x[0-9A-F]{2}>", by_id.get(number, "")):
            kind = gguf.TokenType.BYTE
        kinds.append(kind if number in by_id else gguf.TokenType.UNUSED)
    merges = [m if isinstance(m, list) else m.split(" ") for m in spec["model"]["merges"]]
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocabulary)]
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pieces:
        ranks = {"".join(merge): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([ranks.get(token, -float(len(merges))) for token in tokens])
        prefix = '"Metaspace"' in spaces and '"prepend_scheme": "never"' not in spaces
        writer.add_add_space_prefix(prefix or '"Prepend"' in spaces)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(spec["pre_tokenizer"]))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(False)  # the chat template writes it
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer(spec: dict) -> str:
    """llama.cpp's name for a pre-tokenizer of tokenizer.json."""
    parts = []
    for part in (spec or {}).get("pretokenizers", [spec or {}]):
        kind = part.get("type", "none")
        if kind == "Split":  # told apart by how many digits they keep together
            kind = next(
                (d for d in (r"\p{N}{1,3}", r"\p{N}") if d in str(part["pattern"].get("Regex"))),
                kind,
            )
        parts.append(kind)
    if tuple(parts) not in PRE_TOKENIZERS:
        told = " + ".join(parts)
        sys.exit(f"the pre-tokenizer must be GPT-2's, SmolLM's, Llama 3's or Qwen's; got {told}.")
    return PRE_TOKENIZERS[tuple(parts)]


def check(target: Path, tensors: dict[str, torch.Tensor]) -> float:
    """Compare every tensor in the file, dequantized, with its source; the largest difference."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    if set(found) != set(tensors):
        sys.exit(f"{target} must have the source's tensors; got others.")
    largest = 0.0
    for name, source in tensors.items():
        tensor = found[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(source.shape)
        largest = max(largest, float(np.abs(values - source.float().numpy()).max()))
    return largest


def main(folder: str, target: str) -> float:
    """Convert FOLDER to the file TARGET; the largest difference of a weight, which must be 0."""
    tensors = write(Path(folder), Path(target))
    largest = check(Path(target), tensors)
    print(f"{target}: {len(tensors)} tensors, largest difference to {folder}: {largest:g}")
    return largest


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]) != 0)
