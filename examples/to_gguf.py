"""A Llama-family folder that Tandem saved, as GGUF for llama.cpp and its kin; then checked.

    pip install gguf
    python examples/to_gguf.py RUN/ppo/actor model.gguf

Weights are written as they are (fp32, fp16, bf16), with the tokenizer (byte-level BPE) and its chat
template. Then the file is read again: every tensor must equal its source. llama.cpp's own
convert_hf_to_gguf.py knows more families and quantizes.
"""

import json
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


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF."""
    if name in NAMES:
        return NAMES[name]
    _, _, number, rest = name.split(".", 3)  # model.layers.3.REST
    return f"blk.{number}.{NAMES[rest]}"


def for_gguf(name: str, tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbors where Hugging Face rotates halves: rows of q and k are moved."""
    count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
    if count is None:
        return tensor
    rows = tensor.shape[0] // count // 2
    return tensor.view(count, 2, rows, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write the file; returns its tensors by name."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama":
        sys.exit(f"{folder} must be of the Llama family; got {config['model_type']!r}.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    rope = config.get("rope_parameters") or {}
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
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
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
    """A byte-level BPE tokenizer: its tokens, merges, control tokens and chat template."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    if spec["model"]["type"] != "BPE":
        sys.exit(f"the tokenizer must be byte-level BPE; got {spec['model']['type']}.")
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    special = {added["id"] for added in spec["added_tokens"] if added["special"]}
    added = {added["id"] for added in spec["added_tokens"]} - special
    kinds = []
    for number in range(vocabulary):
        kind = gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
        kind = gguf.TokenType.USER_DEFINED if number in added else kind
        kinds.append(kind if number in by_id else gguf.TokenType.UNUSED)
    merges = [" ".join(m) if isinstance(m, list) else m for m in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(vocabulary)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
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
