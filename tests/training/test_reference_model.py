"""A reference that is another model than the policy as it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem import make_engine
from tandem.config.load import check_config
from tandem.errors import CheckpointError, ConfigError, ModelError
from tandem.types import Source, TokenBatch, TokenRow
from tests.data.built_tokenizers import sentencepiece
from tests.tiny import save_tiny_model, tiny_config, tiny_llama
from tests.training import letter_rewards
from tests.training.runs import ran, weights_of

REWARD = f"{letter_rewards.__file__}:starts_early"
CHANGES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "kto": {},
    "ppo": {"ppo__reward_function": REWARD, "ppo__kl_coef": 0.5},
    "grpo": {"grpo__reward_function": REWARD, "grpo__kl": "k2-in-loss", "grpo__kl_coef": 0.5},
    "online-dpo": {"ppo__reward_function": REWARD},
}


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("another"), seed=7)


def trained(folder: Path, model: str, data: str, stage: str, **more: Any) -> dict[str, Any]:
    changes = {"stages": [stage], "ppo__steps": 2, "grpo__steps": 2, **CHANGES[stage], **more}
    if stage == "online-dpo":
        changes["sampling__samples_per_prompt"] = 2
    ran(tiny_config(folder, model, data, **changes))
    if (folder / stage / "actor").is_dir():
        return weights_of(folder, stage)
    return AutoModelForCausalLM.from_pretrained(folder / stage).state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", CHANGES)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_model_that_the_stage_begins_with_changes_nothing_and_another_does(
    stage: str, rank: int, tmp_path: Path, tiny_model: str, another: str, preferences: str
) -> None:
    if rank and stage in ("kto", "grpo"):
        pytest.skip("as dpo and ppo")
    lora = {"lora__rank": rank}
    plain = trained(tmp_path / "plain", tiny_model, preferences, stage, **lora)
    named = trained(
        tmp_path / "same", tiny_model, preferences, stage, reference_model=tiny_model, **lora
    )
    assert all(torch.equal(plain[name], named[name]) for name in plain)
    other = trained(
        tmp_path / "other", tiny_model, preferences, stage, reference_model=another, **lora
    )
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.parametrize("rank", [0, 2])
def test_its_log_probs_are_those_of_hugging_face_s_forward(
    rank: int, tmp_path: Path, tiny_model: str, another: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path, tiny_model, preferences, stages=["ppo"], reference_model=another,
        ppo__reward_function=REWARD, lora__rank=rank, sampling__temperature=0.7,
    )  # fmt: skip
    engine = make_engine(config, tiny_model)
    ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    source = Source("made", "made", 1)
    rows = [TokenRow(tuple(row), (False,) * 4 + (True,) * 8, source) for row in ids.tolist()]
    batch = TokenBatch.from_rows(rows, 0)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(another)(ids).logits[:, :-1] / 0.7
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    found = engine.reference_logprobs(batch)
    assert torch.allclose(found[:, 4:], expected[:, 3:], atol=1e-5)
    given = AutoModelForCausalLM.from_pretrained(another)
    engine = make_engine(config, tiny_model, reference=given)
    assert torch.equal(engine.reference_logprobs(batch), found)


def test_one_that_is_of_no_use_is_refused(
    tmp_path: Path, tiny_model: str, another: str, preferences: str
) -> None:
    for changes in ({"stages": ["sft"]}, {"stages": ["dpo"], "dpo__loss": "simpo"}):
        config = tiny_config(
            tmp_path / "run", tiny_model, preferences, reference_model=another, **changes
        )
        with pytest.raises(ConfigError, match="reference_model must be empty where no stage"):
            check_config(config)
    tokenizer = sentencepiece()
    tiny_llama(len(tokenizer)).save_pretrained(tmp_path / "foreign")
    tokenizer.save_pretrained(tmp_path / "foreign")
    foreign = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft", "dpo"],
        reference_model=str(tmp_path / "foreign"),
    )  # fmt: skip
    with pytest.raises(ModelError, match="must have the policy's tokens, which it reads"):
        ran(foreign)
    assert not (tmp_path / "run").exists(), "no stage has run before"


def test_one_with_too_few_positions_is_refused(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    short = save_tiny_model(tmp_path / "short")
    settings = Path(short) / "config.json"
    settings.write_text(
        settings.read_text().replace(
            '"max_position_embeddings": 256', '"max_position_embeddings": 20'
        )
    )
    for stage in ("dpo", "ppo"):
        config = tiny_config(
            tmp_path / "run", tiny_model, preferences, stages=[stage], reference_model=short,
            ppo__reward_function=REWARD,
        )  # fmt: skip
        with pytest.raises(
            ConfigError, match=f"of stage {stage} must fit the reference model's 20"
        ):
            ran(config)


def test_another_reference_is_another_run(
    tmp_path: Path, tiny_model: str, another: str, preferences: str
) -> None:
    def config(reference: str) -> Any:
        return tiny_config(
            tmp_path / "run", tiny_model, preferences, stages=["dpo"], reference_model=reference
        )

    lines: list[str] = []
    ran(config(another), lines=lines)
    assert f"dpo: the reference is {another}" in lines
    ran(config(another))
    with pytest.raises(CheckpointError, match=r"changed: .*reference_model"):
        ran(config(""))
    with pytest.raises(CheckpointError, match=r"changed: .*the files of reference_model"):
        ran(config(tiny_model))
