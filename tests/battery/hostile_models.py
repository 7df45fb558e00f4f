"""Model folders that lie: each function turns a good folder into one hostile one, in place.

CANARY is written by whatever code a folder manages to run.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

CANARY = "TANDEM_TEST_CANARY"
"""Names the file, in the environment, that must never come to be."""
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
Spoil = Callable[[Path], None]


class Bomb:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ[CANARY]}",)


_ECHO = "{% for m in messages %}{{ m.content }}{% endfor %}"
_ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
_CODE = f"import os\nopen(os.environ[{CANARY!r}], 'w').close()\nclass Evil: pass\n"


def _edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def _pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def _config(**changes: Any) -> Spoil:
    return lambda folder: _edit_json(folder / "config.json", **changes)


def _pickle_instead(*names: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for name in names:
            (folder / name).write_bytes(pickle.dumps(Bomb()))

    return spoil


def _pickle_beside(folder: Path) -> None:
    names = ("pytorch_model.bin", "optimizer.pt", "rng_state.pth", "adapter_model.bin", "vocab.pkl")
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Bomb()))


def _pickle_named_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb()))


def _index(weight_map: Any) -> Spoil:
    """An index in place of the one file; what it names lies beside and above the folder."""

    def spoil(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
        (folder / "inside.safetensors").symlink_to(folder.parent / "outside.safetensors")
        (folder / "shard.bin").write_bytes(pickle.dumps(Bomb()))
        if isinstance(weight_map, str):
            listed = {name: weight_map.format(folder.parent) for name in names}
            (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
        else:
            (folder / _INDEX).write_text(json.dumps(weight_map))

    return spoil


def _header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """The weights under a header that was tampered with."""

    def spoil(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        changed = change(header)
        text = json.dumps(header if changed is None else changed).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    return spoil


def _nest(header: dict[str, Any]) -> None:
    header["x"] = json.loads("[" * 900 + "]" * 900)


def _overlap(header: dict[str, Any]) -> None:
    for entry in header.values():
        entry["data_offsets"] = [0, 4]


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return header[min(header)]


def _raw(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return spoil


def _weights(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def _fill(value: float) -> Spoil:
    def fill(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][3] = value

    return _weights(fill)


def _remote_code(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text(_CODE)
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = dict.fromkeys(kinds, "modeling_evil.Evil")
    _edit_json(folder / "config.json", model_type="evil", auto_map=auto_map)
    _edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.Evil"]})


def _remote_tokenizer(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text(_CODE)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(_CODE)
    _edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["modeling_evil.Evil", "modeling_evil.Evil"]},
    )


def _tokenizer(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return spoil


def _added_id(number: int) -> Spoil:
    def change(content: dict[str, Any]) -> None:
        token = {"id": number, "content": "<huge>", "special": True, "single_word": False}
        content["added_tokens"].append(
            token | {"lstrip": False, "rstrip": False, "normalized": False}
        )

    return _tokenizer(change)


def _text(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content) and None


def _template(source: str) -> Spoil:
    return _text("chat_template.jinja", source)


def _adapter(base: str, **changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": base}
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))

    return spoil


REFUSED: dict[str, Spoil] = {
    "pickled weights": _pickle_instead("pytorch_model.bin"),
    "pickled weights of every name": _pickle_instead("model.pt", "x.pth", "model.bin", "a.pkl"),
    "a pickle named safetensors": _pickle_named_safetensors,
    "an index into a pickle": _index("shard.bin"),
    "an index out of the folder": _index("../outside.safetensors"),
    "an index to an absolute path": _index("{}/outside.safetensors"),
    "an index of numbers": _index({"metadata": {}, "weight_map": {"a": 7}}),
    "an index that is a list": _index([1, 2]),
    "an index without a map": _index({"metadata": None}),
    "an index beside the weights": _text(_INDEX, '{"weight_map": {"a": "../b.bin"}}'),
    "an empty index": _index({"metadata": {}, "weight_map": {}}),
    "a header longer than the file": _raw(lambda raw: struct.pack("<Q", 2**40) + raw[8:]),
    "a header of 2^64 - 1 bytes": _raw(lambda raw: b"\xff" * 8 + raw[8:]),
    "a header that is a list": _header(lambda header: [1, 2, 3]),
    "a header nested deeply": _header(_nest),
    "weights cut short": _raw(lambda raw: raw[: len(raw) // 2]),
    "weights that are empty": _raw(lambda raw: b""),
    "a shape of 2^62": _header(lambda header: _first(header).update(shape=[2**62, 8])),
    "a negative shape": _header(lambda header: _first(header).update(shape=[-1, 8])),
    "a shape that overflows": _header(lambda header: _first(header).update(shape=[2**33, 2**33])),
    "offsets beyond the file": _header(lambda h: _first(h).update(data_offsets=[0, 2**40])),
    "negative offsets": _header(lambda header: _first(header).update(data_offsets=[-8, 8])),
    "offsets that overlap": _header(_overlap),
    "an unknown dtype": _header(lambda header: _first(header).update(dtype="PICKLE")),
    "weights of integers": _header(lambda header: _first(header).update(dtype="I32")),
    "weights that are NaN": _fill(float("nan")),
    "weights that are infinite": _fill(float("inf")),
    "config.json that is a list": _text("config.json", "[]"),
    "config.json nested deeply": _text("config.json", '{"a":' * 100_000),
    "config.json of numbers too long": _text("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
    "config.json that is no UTF-8": _raw(lambda raw: b"\xff\xfe", "config.json"),
    "no family": _config(model_type=None),
    "a family that is a list": _config(model_type=["llama"]),
    "a family that is a path": _config(model_type="../../evil"),
    "remote code": _remote_code,
    "layers as text": _config(num_hidden_layers="2"),
    "a billion layers": _config(num_hidden_layers=10**9),
    "a vocabulary of 2^40": _config(vocab_size=2**40),
    "a vocabulary of 2^24": _config(vocab_size=2**24),
    "a width of 2^30": _config(hidden_size=2**30, intermediate_size=2**30),
    "a negative width": _config(hidden_size=-32),
    "no heads": _config(num_attention_heads=0),
    "heads that are null": _config(num_attention_heads=None, num_key_value_heads=None),
    "an activation that is a path": _config(hidden_act="../../evil.py"),
    "rope scaling of the wrong type": _config(rope_scaling="evil", rope_parameters=[1]),
    "a rope of a trillion positions": _config(max_position_embeddings=10**12, model_type="gpt2"),
    "attention from the hub": _config(_attn_implementation="evil/kernel"),
    "attention from the hub, by its other name": _config(attn_implementation="evil/kernel"),
    "quantized by an unknown method": _config(quantization_config={"quant_method": "evil"}),
    "quantized by a list": _config(quantization_config=[1]),
    "an encoder-decoder": _config(is_encoder_decoder=True),
    "a dropout that is text": _config(attention_dropout="high"),
    "a tokenizer of code": _remote_tokenizer,
    "tokenizer.json that is a list": _text("tokenizer.json", "[]"),
    "tokenizer.json nested deeply": _text("tokenizer.json", '{"a":' * 50_000),
    "tokenizer_config.json that is a list": _text("tokenizer_config.json", "[]"),
    "a token id of 2^32 - 1": _added_id(2**32 - 1),
    "a vocabulary with a gap of 2^31": _tokenizer(lambda c: c["model"]["vocab"].update(zz=2**31)),
    "a token id that is negative": _added_id(-1),
    "a token id that is a float": _added_id(1.5),  # type: ignore[arg-type]
    "a tokenizer without a model": _tokenizer(lambda content: content.pop("model")),
    "a tokenizer of an unknown kind": _tokenizer(lambda c: c["model"].update(type="Evil")),
    "merges of no tokens": _tokenizer(lambda c: c["model"].update(merges=[["zz", "qq"]])),
    "a template that divides by zero": _template("{{ 1 / 0 }}"),
    "a template that runs code": _template("{{ cycler.__init__.__globals__.os.getpid() }}"),
    "a template that reads files": _template("{% include '/etc/passwd' %}"),
    "a template of great length": _template("{{ 'a' * 30000000 }}" + _ECHO),
    "a template of 1.5 GB": _template("{% set x = 'a' * 1500000000 %}" + _ECHO),
    "a template without end": _template(_ENDLESS + _ECHO),
    "thirty million labels": _config(num_labels=30_000_000),
    "weights that are a pipe": _pipe,
    "an unknown cache": _text("generation_config.json", '{"cache_implementation": "evil"}'),
    "an adapter on a base elsewhere": _adapter("../../../etc"),
    "an adapter on a base of code": _adapter("\x1b[31mevil"),
    "an adapter on a number": _adapter(7),  # type: ignore[arg-type]
    "an adapter of a huge rank": _adapter(".", r=10**12),
    "stop tokens that are text": _text("generation_config.json", '{"eos_token_id": "evil"}'),
    "generation_config.json that is a list": _text("generation_config.json", "[]"),
}  # fmt: skip
"""What must be refused in one line."""

CONTAINED: dict[str, Spoil] = {
    "pickles beside the weights": _pickle_beside,
    "a symbolic link for weights": lambda folder: (
        (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
        and (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere.safetensors")
    ),
    "code that nothing asks for": _text("modeling_llama.py", _CODE),
}
"""What may load, as if the hostile part were not there."""
