"""Runs whose adapters train the embeddings of the chat template's control tokens too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.lora import LoraConfig
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.data.render import Renderer
from tandem.data.trained_tokens import token_ids_of, tokens_to_train
from tandem.errors import ConfigError, ModelError
from tandem.models.load import load_causal_lm
from tandem.training.checks.trained_tokens import untrained
from tests.ranks import on_ranks
from tests.tiny import save_tiny_model, tiny_config, tiny_tokenizer
from tests.training.runs import ran, ran_with_stops

LORA = LoraConfig(rank=3, train_tokens=("control",))
CONTROL = [1, 2, 3, 4]
ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def config_of(folder: Path, model: str, preferences: str, **changes: object) -> RunConfig:
    config = tiny_config(
        folder, model, preferences, ppo__ema=True, save_every=1,
        sft__max_steps=2, reward__max_steps=2, ppo__steps=2, **changes,
    )  # fmt: skip
    fast = replace(config.sft, lora_learning_rate=1e-2)
    return replace(config, lora=LORA, sft=fast)


def rows_of(run: Path | str, part: str) -> torch.Tensor:
    return load_file(Path(run) / part / "adapter/adapter_model.safetensors")[ROWS]


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> RunConfig:
    """Of a finished run."""
    folder = tmp_path_factory.mktemp("rows") / "run"
    config = config_of(folder, tiny_model, preferences)
    lines: list[str] = []
    ran(config, lines=lines)
    # The sampler's log-probs are the training forward's: rows in packed matrices, and beside them.
    assert any("equals the training forward bit for bit" in line for line in lines)
    assert any(
        "the embeddings of <|system|> (1), <|user|> (2), <|assistant|> (3), <|end|> (4) are" in line
        for line in lines
    )
    return config


def test_every_stage_trains_the_rows_and_nothing_else_of_the_matrix(
    config: RunConfig, tiny_model: str
) -> None:
    run = Path(config.output_dir)
    base = load_file(Path(tiny_model) / "model.safetensors")["model.embed_tokens.weight"]
    for part in ("sft", "reward", "ppo/actor", "ppo/critic", "ppo/ema"):
        written = json.loads((run / part / "adapter/adapter_config.json").read_text())
        assert written["trainable_token_indices"] == {"model.embed_tokens": CONTROL}
        whole = load_file(run / part / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(whole[CONTROL], rows_of(run, part))
        assert torch.equal(whole[5:], base[5:])
        moved = (whole[CONTROL] - base[CONTROL]).abs().amax(1)
        assert float(moved.min()) > 0, part


def test_the_first_update_starts_at_the_reference(config: RunConfig) -> None:
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    first = next(r["values"] for r in records if r["stage"] == "ppo" and r["step"] == 1)
    assert first["kl"] == 0.0


def test_a_run_continues_to_the_same_bits(config: RunConfig, tmp_path: Path) -> None:
    stops = [("sft", 2), ("ppo", 2)]
    lines = ran_with_stops(config, tmp_path / "stopped", stops)
    assert any("continuing after step 1" in line for line in lines)
    for part in ("sft", "ppo/actor", "ppo/critic", "ppo/ema"):
        ours, alone = (rows_of(run, part) for run in (tmp_path / "stopped", config.output_dir))
        assert torch.equal(ours, alone), part


@pytest.mark.parametrize(
    "stages", [("sft",), pytest.param(("sft", "reward", "ppo"), marks=pytest.mark.slow)]
)
def test_two_ranks_train_the_same_rows(
    stages: tuple[str, ...], config: RunConfig, tmp_path: Path
) -> None:
    """Four rows over two ranks, of a matrix that is split too."""
    parallel = ParallelConfig(actor_zero_stage=3, critic_zero_stage=1)
    split = replace(config, output_dir=str(tmp_path / "split"), parallel=parallel)
    split = replace(split, stages=stages, dataset=replace(split.dataset, split=(2, 4, 4)))
    on_ranks(2, ran_on_rank, split)
    for part in ("sft", "reward", "ppo/actor", "ppo/critic") if len(stages) > 1 else ("sft",):
        ours, alone = rows_of(tmp_path / "split", part), rows_of(config.output_dir, part)
        assert torch.allclose(ours, alone, atol=1e-5), part


def ran_on_rank(world, config) -> None:  # type: ignore[no-untyped-def]
    ran(config, world)


def test_quantized_shared_bases_carry_the_rows_on(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    """Later stages train the rows of the stage before, beside one base for all roles."""
    parallel = ParallelConfig(shared_base=True, frozen_weights="nf4")
    config = config_of(tmp_path / "run", tiny_model, preferences)
    run = ran(replace(config, parallel=parallel, ppo=replace(config.ppo, steps=1, ema=False)))
    written = json.loads((run / "ppo/actor/adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == tiny_model
    base = load_file(Path(tiny_model) / "model.safetensors")["model.embed_tokens.weight"]
    start, end = rows_of(run, "sft"), rows_of(run, "ppo/actor")
    assert 0 < float((end - start).abs().max()) < float((end - base[CONTROL]).abs().max())
    other = config_of(tmp_path / "other", str(run / "sft/adapter"), preferences)
    other = replace(other, lora=replace(LORA, train_tokens=()), stages=("sft",))
    with pytest.raises(ModelError, match=r"must be the tokens .* got none for ids 1 2 3 4"):
        ran(other)


def test_a_run_goes_on_from_an_adapter_with_rows(
    config: RunConfig, tmp_path: Path, preferences: str
) -> None:
    adapter = Path(config.output_dir) / "sft/adapter"
    going = config_of(tmp_path / "run", str(adapter), preferences)
    run = ran(replace(going, stages=("dpo",)))
    start, end = (load_causal_lm(path) for path in (adapter, run / "dpo/adapter"))
    assert not torch.equal(start.lm_head.lora_tokens.weight, end.lm_head.lora_tokens.weight)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["values"].get("loss") for line in lines]
    first = next(loss for loss in losses if loss is not None)
    assert first == pytest.approx(0.6931472, abs=1e-6), "the reference has the rows of the start"


def test_names_become_ids() -> None:
    tokenizer = tiny_tokenizer()
    renderer = Renderer(tokenizer)
    assert token_ids_of(["control"], renderer) == tuple(CONTROL)
    assert token_ids_of(["<|pad|>", "<|end|>", "<|end|>"], renderer) == (0, 4)
    assert tokens_to_train(LoraConfig(train_tokens=("control",)), tokenizer) == (), "no adapters"
    tokenizer.chat_template = None
    assert token_ids_of(["control"], Renderer(tokenizer)) == (4,), "EOS ends the default's answers"
    with pytest.raises(ConfigError, match=r"got '<\|edn\|>', which is not one token. Did you mean"):
        token_ids_of(["<|edn|>"], renderer)


def test_control_is_the_templates_tokens_in_a_vocabulary_with_that_word() -> None:
    """As GPT-2's and SmolLM2's have."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["control"])
    renderer = Renderer(tokenizer)
    assert "control" in renderer.vocabulary
    assert token_ids_of(["control"], renderer) == tuple(CONTROL)


def test_a_name_that_is_no_token_is_refused_before_anything_is_trained(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = config_of(tmp_path / "run", tiny_model, preferences)
    with pytest.raises(ConfigError, match=r"train_tokens must go with adapters .* Set --lora-rank"):
        ran(replace(config, lora=replace(LORA, rank=0)))
    config = replace(config, lora=replace(LORA, train_tokens=("<|edn|>",)))
    with pytest.raises(ConfigError, match=r"lora.train_tokens must name tokens of the tokenizer's"):
        ran(config)
    assert not (tmp_path / "run").exists()


def test_untrained_control_tokens_are_noted(tmp_path: Path, preferences: str) -> None:
    """New rows of a resized model: all alike, or small; those of a model in use are neither."""
    folder = Path(save_tiny_model(tmp_path / "model"))
    assert untrained(folder, CONTROL) == []
    assert untrained(tmp_path / "nowhere", CONTROL) == []
    weights = load_file(folder / "model.safetensors")
    matrix = weights["model.embed_tokens.weight"]
    matrix[2] = matrix[600] * 1.001
    matrix[4] *= 0.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert untrained(folder, CONTROL) == [2, 4]
    config = config_of(tmp_path / "run", str(folder), preferences)
    lines: list[str] = []
    lora = replace(LORA, train_tokens=("<|end|>",))
    ran(replace(config, lora=lora, stages=("sft",)), lines=lines)
    (note,) = (line for line in lines if "look untrained" in line)
    assert "the embeddings of the chat template's <|user|> (2) look untrained in" in note
    assert note.endswith("give --lora.train-tokens control")
