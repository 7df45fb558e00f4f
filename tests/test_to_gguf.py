"""examples/to_gguf.py: the file holds the source's weights, tokens and logits (needs gguf), and
llama.cpp itself says the same (where the xllamacpp wheel is installed)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.scalar import load_scalar_model
from tests.tiny import save_tiny_model

pytest.importorskip("gguf", reason="the example needs the gguf package")


@pytest.fixture(scope="module")
def to_gguf() -> ModuleType:
    path = Path(__file__).parents[1] / "examples/to_gguf.py"
    spec = importlib.util.spec_from_file_location("to_gguf", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["to_gguf"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pieces(shared: Path) -> Path:
    """stories260K: SentencePiece BPE with byte fallback."""
    return shared / "models/stories260K/hf"


def converted(to_gguf: ModuleType, source: Path, folder: Path) -> Path:
    folder.mkdir()
    assert to_gguf.main(str(source), str(folder / "model.gguf")) == 0
    return folder


def logits_of(folder: Path, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    with torch.no_grad():
        return model(ids).logits


def test_a_llama_folder_becomes_gguf_and_is_the_same_model(
    to_gguf: ModuleType, tmp_path: Path
) -> None:
    folder = Path(save_tiny_model(tmp_path / "model"))
    ids = torch.arange(3, 40)[None]
    made = converted(to_gguf, folder, tmp_path / "gguf")
    assert torch.equal(logits_of(folder, ids), logits_of(made, ids, gguf_file="model.gguf"))


def test_sentencepiece_tokens_survive(to_gguf: ModuleType, pieces: Path, tmp_path: Path) -> None:
    made = converted(to_gguf, pieces, tmp_path / "gguf")
    ids = torch.arange(3, 40)[None]
    assert torch.equal(logits_of(pieces, ids), logits_of(made, ids, gguf_file="model.gguf"))
    ours = AutoTokenizer.from_pretrained(pieces)
    theirs = AutoTokenizer.from_pretrained(made, gguf_file="model.gguf")
    for text in ("Once upon a time, there was a bird.", "naïve 12 東京"):
        assert theirs(text, add_special_tokens=False) == ours(text, add_special_tokens=False)


def test_llama_cpp_gives_the_same_greedy_text(
    to_gguf: ModuleType, pieces: Path, tmp_path: Path
) -> None:
    """From the text on, so its tokens, template and arithmetic are llama.cpp's own."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is in the xllamacpp wheel")
    tokenizer, model = load_tokenizer(pieces), load_causal_lm(str(pieces)).eval()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made = converted(to_gguf, tmp_path / "model", tmp_path / "gguf")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(made / "model.gguf"), 512, 1
    params.cpuparams.n_threads, params.warmup, params.verbosity = 1, False, -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    for words in ("Once upon a time", "Tom and Lily saw a big dog"):
        turns = [{"role": "user", "content": words}]
        prompt = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        size = prompt["input_ids"].shape[1]
        ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
        answer = server.handle_chat_completions(
            {"messages": turns, "max_tokens": 40, "temperature": 0}
        )
        assert answer["usage"]["prompt_tokens"] == size
        said = answer["choices"][0]["message"]["content"]
        assert said.strip() == tokenizer.decode(ids[size:], skip_special_tokens=True).strip()


def test_what_cannot_be_converted_is_one_line(
    to_gguf: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "model.gguf")
    with pytest.raises(SystemExit, match="must be a model's folder, as RUN/ppo/actor is; got no"):
        to_gguf.main(str(tmp_path), target)
    folder = Path(save_tiny_model(tmp_path / "model"))
    scalar = load_scalar_model(str(folder), seed=0)
    scalar.save_pretrained(tmp_path / "scalar")
    with pytest.raises(SystemExit, match="must be a LlamaForCausalLM; got LlamaForSequenceC"):
        to_gguf.main(str(tmp_path / "scalar"), target)
    model = load_causal_lm(str(folder))
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    model.config.save_pretrained(folder)
    with pytest.raises(SystemExit, match="must have plain rotary embeddings; got linear"):
        to_gguf.main(str(folder), target)
    with pytest.raises(SystemExit, match=r"got model\.layers\.0"):
        to_gguf.gguf_name("model.layers.0.self_attn.q_proj.bias")
    assert not Path(target).exists()


def test_pre_tokenizers_have_llama_cpps_names(to_gguf: ModuleType) -> None:
    byte_level = {"type": "ByteLevel"}
    digits = {"type": "Digits", "individual_digits": True}
    threes = {"type": "Split", "pattern": {"Regex": r"(?i:'s|'t)|\p{L}+|\p{N}{1,3}| ?"}}
    ones = {"type": "Split", "pattern": {"Regex": r"(?i:'s|'t)|\p{L}+|\p{N}| ?"}}
    for parts, name in (
        ([byte_level], "gpt-2"),
        ([digits, byte_level], "smollm"),
        ([threes, byte_level], "llama-bpe"),
        ([ones, byte_level], "qwen2"),
    ):
        assert to_gguf.pre_tokenizer({"type": "Sequence", "pretokenizers": parts}) == name
    assert to_gguf.pre_tokenizer(byte_level) == "gpt-2"
    with pytest.raises(SystemExit, match=r"must be GPT-2's, .*; got Whitespace"):
        to_gguf.pre_tokenizer({"type": "Whitespace"})
