"""The card beside every saved model: each statement in it, against what was run."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem import build_config, train
from tandem.checkpoint.folder import read_manifest
from tandem.config.lora import LoraConfig
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.training.model_card import _used
from tests.tiny import tiny_config

from .runs import ran


@pytest.fixture(scope="module")
def lora_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> RunConfig:
    config = tiny_config(
        tmp_path_factory.mktemp("cards") / "run", tiny_model, preferences,
        sft__max_steps=1, reward__max_steps=2, ppo__steps=1, ppo__eval_prompts=2,
    )  # fmt: skip
    config = replace(config, lora=LoraConfig(rank=2), ppo=replace(config.ppo, ema=True))
    ran(config)
    return config


def card(folder: Path) -> str:
    return (folder / "README.md").read_text("utf-8")


def test_an_adapter_on_quantized_weights_says_so(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], sft__max_steps=1, lora__rank=2,
        parallel__frozen_weights="nf4",
    )  # fmt: skip
    run = ran(config)
    assert "on the base in nf4 and is another model" in card(run / "sft" / "adapter")
    assert "another model" not in card(run / "sft")


def test_each_card_says_what_its_model_is(lora_run: RunConfig, tiny_model: str) -> None:
    run = Path(lora_run.output_dir)
    for name, what in {
        "sft": f"A policy, trained from `{tiny_model}` by Tandem",
        "reward": "A reward model, trained from",
        "ppo/actor": "A policy, trained from",
        "ppo/ema": "The moving average (EMA) of a policy, trained from",
        "ppo/critic": "A critic, trained by Tandem",
    }.items():
        whole, adapter = card(run / name), card(run / name / "adapter")
        assert f"\n{what}" in whole
        assert f"\n{what}" in adapter
        base = json.loads((run / name / "adapter/adapter_config.json").read_text())
        assert f"its base is `{base['base_model_name_or_path']}`" in adapter
        assert "This folder holds the LoRA adapter alone" not in whole
        assert "another model on full weights" not in adapter
        assert "| seed | 1234 |" in whole
        assert "\n```\ntest\n```\n" in whole
    assert ": supervised fine-tuning, then PPO." in card(run / "ppo/actor")
    assert "They are those of the policy, `ppo/actor`." in card(run / "ppo/critic")
    assert "except where they say EMA" in card(run / "ppo/ema")
    assert "They are those" not in card(run / "ppo/actor")
    assert "| ppo.critic.lora_learning_rate | " in card(run / "ppo/critic")


def test_a_folder_never_passes_for_a_hub_name(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is recorded in one run and read from another folder in the next."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/tiny").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    one: dict[str, object] = {"stages": ["sft"], "sft__max_steps": 1}
    ran(tiny_config(tmp_path / "first", "models/tiny", preferences, **one))
    monkeypatch.chdir(tmp_path / "models")
    start = str(tmp_path / "first/sft")
    ran(tiny_config(tmp_path / "second", start, preferences, **one))
    text = card(tmp_path / "second/sft")
    assert f"A policy, trained from `{tmp_path}/models/tiny` by" in text
    assert "base_model" not in text


def test_figures_are_the_manifests(lora_run: RunConfig) -> None:
    run = Path(lora_run.output_dir)
    facts = read_manifest(run / "reward").facts
    text = card(run / "reward")
    assert f"| Steps | {facts['steps']:g} |" in text
    assert facts["steps"] == read_steps(run, "reward")
    shown = re.search(r"\(`score_mean`\) \| (\S+) \|", text)
    assert shown
    assert float(shown[1]) == pytest.approx(facts["normalize_mean"], rel=0.01)
    config = json.loads((run / "reward/config.json").read_text())
    assert config["score_mean"] == facts["normalize_mean"]


def test_a_card_shows_the_values_that_were_used(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    """Not the 0 that leaves them to the loss, the size of a rollout or the number of prompts."""
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["dpo"],
        dpo__max_steps=1, dpo__loss="cdpo",
    )  # fmt: skip
    text = card(ran(config) / "dpo")
    assert "| dpo.beta | 0.1 |" in text
    assert "| dpo.label_smoothing | 0.1 |" in text
    assert "| Held-out preference loss | " in text
    used = _used(RunConfig(), stage_of("ppo"), {"steps": 3.0})
    assert used["ppo.minibatch_size"] == 8
    assert used["ppo.steps"] == 3


def read_steps(run: Path, stage: str) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return max(r["step"] for r in map(json.loads, lines) if r["stage"] == stage)


def test_a_card_names_the_data_of_earlier_runs(
    lora_run: RunConfig, tmp_path: Path, preferences: str
) -> None:
    """PPO in another folder: SFT's and the reward model's rows are in its card too."""
    before = Path(lora_run.output_dir)
    config = tiny_config(
        tmp_path / "later", str(before / "sft"), preferences, stages=["ppo"],
        reward_model=str(before / "reward"), ppo__steps=1, ppo__eval_prompts=2,
    )  # fmt: skip
    run = ran(config)
    text = card(run / "ppo/actor")
    assert f"trained from `{lora_run.actor_model}` by Tandem" in text
    assert ": supervised fine-tuning, then PPO." in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    (account,), (own,) = data_of(before), data_of(run)
    name = account["name"]
    numbers = [*(account["used"][use] for use in ("texts", "pairs")), own["used"]["prompts"]]
    titles = ["Supervised fine-tuning", "Reward model", "PPO"]
    models = [before / "sft", before / "reward", run / "ppo/actor"]
    for row, number, title, model in zip(rows, numbers, titles, models, strict=True):
        assert row.startswith(f"| `{model}` | {title} | ")
        assert f"{name}: {number} of " in row
    assert f"rewarded by reward model {before / 'reward'}" in rows[-1]
    assert f"| `{before / 'sft'}` | {name}" in rows[-1]


def data_of(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "data.json").read_text())["datasets"]
    return found


def test_a_reward_model_of_its_own_has_its_own_base(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    other = tmp_path / "other"
    load_causal_lm(tiny_model).save_pretrained(other)
    load_tokenizer(tiny_model).save_pretrained(other)
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft", "reward"],
        reward_model=str(other), sft__max_steps=1, reward__max_steps=1,
    )  # fmt: skip
    run = ran(config)
    assert f"A reward model, trained from `{other}` by Tandem" in card(run / "reward")
    assert f"A policy, trained from `{tiny_model}` by Tandem" in card(run / "sft")


def test_what_a_program_gave_keeps_its_name(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"What is {i}?", "chosen": "A number.", "rejected": "No"} for i in range(40)]
    config = build_config(
        {"output_dir": str(tmp_path / "run"), "stages": ["sft"], "sft": {"max_steps": 1}}
    )
    model, tokenizer = load_causal_lm(tiny_model), load_tokenizer(tiny_model)
    run = train(config, data=rows, actor_model=model, tokenizer=tokenizer, print_line=str)
    assert f"trained from `{model.name_or_path}` by" in card(run.path / "sft")
    command = f"\n```\ntandem train --config {run.path / 'config.yaml'}\n```"
    assert command in card(run.path / "sft")
    assert repr(run) == f"Run({str(run.path)!r})"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_the_folders_open_as_their_cards_say(lora_run: RunConfig) -> None:
    """In transformers and PEFT; the adapter on its base is the merged model."""
    run = Path(lora_run.output_dir)
    ids = torch.arange(3, 30)[None]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    for name in ("sft", "reward", "ppo/actor", "ppo/ema", "ppo/critic"):
        scores = "SequenceClassification" in card(run / name)
        assert scores == (name in ("reward", "ppo/critic"))
        if scores:
            merged = AutoModelForSequenceClassification.from_pretrained(run / name)
            assert "num_labels=1" in card(run / name / "adapter")
            adapted = AutoPeftModelForSequenceClassification.from_pretrained(
                run / name / "adapter", num_labels=1
            )
        else:
            merged = AutoModelForCausalLM.from_pretrained(run / name)
            adapted = AutoPeftModelForCausalLM.from_pretrained(run / name / "adapter")
        with torch.no_grad():
            ours, theirs = merged.eval()(ids).logits, adapted.eval()(ids).logits
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        for folder in (run / name, run / name / "adapter"):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            told = tokenizer.apply_chat_template(
                turns, return_dict=True, return_assistant_tokens_mask=True
            )
            ids_and_mask = zip(told["input_ids"], told["assistant_masks"], strict=True)
            assert tokenizer.decode([t for t, mine in ids_and_mask if mine]) == "Yes.<|end|>"


def test_a_run_with_a_module_says_that_it_needs_it(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    class Length(torch.nn.Module):
        def forward(self, token_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return attention_mask.sum(1).float() + token_ids[:, -1] % 7

    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["ppo"], ppo__steps=1, ppo__eval_prompts=2
    )
    run = train(config, reward_model=Length(), print_line=str)
    text = card(run.path / "ppo/actor")
    assert "rewarded by the torch module Length" in text
    assert "reward_model=...)  # in Python, a Length" in text


def test_a_reward_model_whose_pad_is_its_end_says_how_to_score_batches(
    lora_run: RunConfig, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    """The card's lines, run: rows of a batch score as alone, their end token included."""
    assert "pad token" not in card(Path(lora_run.output_dir) / "reward")
    shutil.copytree(tiny_model, tmp_path / "model")
    named = tmp_path / "model/tokenizer_config.json"
    words = json.loads(named.read_text("utf-8"))
    named.write_text(json.dumps({**words, "pad_token": words["eos_token"]}), "utf-8")
    ran(
        tiny_config(
            tmp_path / "run",
            str(tmp_path / "model"),
            preferences,
            stages=("reward",),
            reward__max_steps=1,
        )
    )
    folder = tmp_path / "run/reward"
    found = re.search(r"For batches add a pad token:\n\n```\n(.*?)```", card(folder), re.DOTALL)
    assert found is not None
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [f"{text}{tokenizer.eos_token}" for text in ("Hi", "A longer answer than that.")]
    with torch.no_grad():
        alone = [model(**tokenizer(row, return_tensors="pt")).logits for row in rows]
        with pytest.raises(ValueError, match="padding token"):
            model(**tokenizer(rows, return_tensors="pt", padding=True))
        exec(found[1], {"tokenizer": tokenizer, "model": model})
        batch = model(**tokenizer(rows, return_tensors="pt", padding=True)).logits
    torch.testing.assert_close(batch, torch.cat(alone), atol=1e-4, rtol=1e-4)
