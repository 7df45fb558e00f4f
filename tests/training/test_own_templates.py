"""Runs with a chat template of the user's own: saved with every model, kept, and not exchanged."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tandem.config.schema import RunConfig
from tandem.data.chat.own_template import KEPT
from tandem.errors import CheckpointError, ConfigError, ModelError
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.parallel.world import World
from tandem.serve.loading import LoadSettings, load_policy
from tandem.serve.place import Place
from tandem.serve.sources import offer_of
from tandem.training.comparing.eval_command import evaluate_run
from tandem.training.own_templates import settle_template
from tandem.training.run_folder import Run
from tandem.training.run_stages import tokenizer_sources, train
from tandem.training.stage_data import prepare_rows
from tests.tiny import tiny_config
from tests.training.runs import StopError, ran, stop_at

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CPU = LoadSettings(Place(torch.device("cpu"), torch.float32))
HELLO = [{"role": "user", "content": "hello"}]


def with_template(config: RunConfig, value: str) -> RunConfig:
    return replace(config, dataset=replace(config.dataset, chat_template=value))


def alone(config: RunConfig, stage: str, value: str = "") -> RunConfig:
    return replace(with_template(config, value), stages=(stage,))


def says(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    return str(text)


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> RunConfig:
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.jinja").write_text(TEMPLATE)
    plain = tiny_config(
        folder / "run", tiny_model, preferences, sft__max_steps=1, reward__max_steps=1,
        ppo__steps=1, ppo__ema=True, ppo__eval_prompts=2, reward__normalize_prompts=2,
    )  # fmt: skip
    return with_template(plain, str(folder / "mine.jinja"))


@pytest.fixture(scope="module")
def finished(config: RunConfig) -> RunConfig:
    """SFT with the template; then the others, which are not told of it, without its file."""
    ran(alone(config, "sft", config.dataset.chat_template))
    file = Path(config.dataset.chat_template)
    file.rename(file.with_suffix(".away"))
    lines: list[str] = []
    ran(replace(with_template(config, ""), stages=("reward", "ppo")), lines=lines)
    file.with_suffix(".away").rename(file)
    assert any(line.startswith("chat template: ") and "as for sft" in line for line in lines)
    return config


def test_every_model_is_saved_with_it(finished: RunConfig) -> None:
    run = Path(finished.output_dir)
    for name in ("sft", "reward", "ppo/actor", "ppo/critic", "ppo/ema"):
        eos = AutoTokenizer.from_pretrained(run / name).eos_token
        assert says(run / name) == f"[user]hello{eos}[assistant]", name
    assert (run / KEPT).read_text() == TEMPLATE


def test_a_tokenizers_own_with_a_variable_is_what_models_keep(
    config: RunConfig, tiny_model: str, tmp_path: Path
) -> None:
    """Of all stages, though later ones are not told of it; another value is refused."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    asks = "{% if add_generation_prompt %}[assistant]{% endif %}"
    source = TEMPLATE.removesuffix(asks) + asks.replace(
        "[assistant]", "[{{ who | default('it') }}]"
    )
    source = source.replace("[{{ m.role }}]", "[{{ who if m.role == 'assistant' else m.role }}]")
    (model / "chat_template.jinja").write_text(source)
    run = replace(config, actor_model=str(model), output_dir=str(tmp_path / "run"))
    ran(alone(run, "sft", "tokenizer?who=me"))
    lines: list[str] = []
    ran(replace(with_template(run, ""), stages=("reward",)), lines=lines)
    assert any("chat template: tokenizer?who=me, as for sft" in line for line in lines)
    for name in ("sft", "reward"):
        eos = AutoTokenizer.from_pretrained(tmp_path / "run" / name).eos_token
        assert says(tmp_path / "run" / name) == f"[user]hello{eos}[me]", name
    assert not (tmp_path / "run" / KEPT).exists()
    with pytest.raises(CheckpointError, match=r"changed: dataset.chat_template .*\?who=you"):
        ran(alone(run, "sft", "tokenizer?who=you"))


def test_all_of_it_is_finished_with_and_without_it(finished: RunConfig) -> None:
    lines: list[str] = []
    ran(finished, lines=lines)
    assert sum("finished before" in line for line in lines) == 3
    moved = Path(finished.dataset.chat_template).with_name("moved.jinja")
    moved.write_text(TEMPLATE)
    ran(with_template(finished, str(moved)), lines=lines)
    assert sum("finished before" in line for line in lines) == 6


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (TEMPLATE.replace("[", "<"), r"changed: the chat template \(its text\)"),
        ("none", r"changed: dataset.chat_template .* -> \"none\", the chat template \(its text\)"),
    ],
)
def test_another_one_is_refused_also_by_later_stages(
    finished: RunConfig, text: str, part: str, tmp_path: Path
) -> None:
    value = text
    if text != "none":
        value = str(tmp_path / "other.jinja")
        Path(value).write_text(text)
        part = r"changed: dataset.chat_template .*, the chat template \(its text\)"
    with pytest.raises(CheckpointError, match=part):
        ran(with_template(finished, value))
    with pytest.raises(CheckpointError, match=part):
        ran(alone(finished, "dpo", value))


def test_it_is_evaluated_without_the_file(
    finished: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = Path(finished.dataset.chat_template)
    file.rename(tmp_path / "away")
    try:
        evaluation = evaluate_run(finished.output_dir, 2)
        offer = offer_of(finished.output_dir)
        base = load_policy(offer.models["base"], CPU, offer.config)
    finally:
        (tmp_path / "away").rename(file)
    assert "ppo" in evaluation["models"]
    actor = load_policy(offer.models["ppo"], CPU, offer.config)
    assert base.renderer.renders_like(actor.renderer)  # or its KL could not be taken


def test_the_same_command_goes_on_without_its_file(finished: RunConfig, tmp_path: Path) -> None:
    file = Path(finished.dataset.chat_template)
    file.rename(tmp_path / "away")
    lines: list[str] = []
    try:
        ran(finished, lines=lines)
        with pytest.raises(ConfigError, match="which does not exist"):
            ran(with_template(finished, "other.jinja"))
    finally:
        (tmp_path / "away").rename(file)
    assert sum("finished before" in line for line in lines) == 3


def test_a_later_stage_reads_pairs_as_the_folders_reward_model_does(finished: RunConfig) -> None:
    run = Run(alone(finished, "ppo", finished.dataset.chat_template))
    assert tokenizer_sources(run)[1] == str(Path(finished.output_dir) / "reward")


def test_a_stopped_stage_goes_on_with_what_it_began_with(config: RunConfig, tmp_path: Path) -> None:
    own = alone(replace(config, output_dir=str(tmp_path / "run")), "sft", "none")
    own = replace(own, sft=replace(own.sft, max_steps=3), save_every=1)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "sft", 2)
        with pytest.raises(StopError):
            ran(own)
    offer = offer_of(own.output_dir)
    served = load_policy(offer.models["sft"], CPU, offer.config)
    assert (served.step, served.renderer.takes_more_turns) == (1, False)
    lines: list[str] = []
    ran(with_template(own, ""), lines=lines)
    assert f"chat template: none, as for sft of {own.output_dir}" in lines
    assert any("continuing after step" in line for line in lines)
    assert says(tmp_path / "run" / "sft").endswith("hello")


def test_both_tokenizers_get_it_but_a_finished_reward_model_keeps_its_own(
    config: RunConfig, tiny_model: str, tmp_path: Path
) -> None:
    bare = load_tokenizer(tiny_model)
    bare.chat_template = None
    for name in ("judge", "bare"):
        load_causal_lm(tiny_model).save_pretrained(tmp_path / name)
    load_tokenizer(tiny_model).save_pretrained(tmp_path / "judge")
    bare.save_pretrained(tmp_path / "bare")
    trained = replace(config, stages=("sft", "reward", "ppo"))
    rows = prepare_rows(trained, tiny_model, str(tmp_path / "judge"))
    assert rows.renderer.renders_like(rows.reward_renderer)
    assert rows.reward_tokenizer.chat_template == TEMPLATE
    rows = prepare_rows(alone(config, "ppo", config.dataset.chat_template), tiny_model,
                        str(tmp_path / "judge"))  # fmt: skip
    assert not rows.renderer.renders_like(rows.reward_renderer)
    rows = prepare_rows(alone(config, "ppo", config.dataset.chat_template), tiny_model,
                        str(tmp_path / "bare"))  # fmt: skip
    assert rows.renderer.renders_like(rows.reward_renderer)


def test_what_cannot_be_used_is_told_before_anything_is_written(
    config: RunConfig, tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    own = replace(with_template(config, str(file)), output_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="which does not exist"):
        settle_template(own, World())
    file.write_text(TEMPLATE.replace("{{ eos_token }}", "<|unknown_end|>"))
    with pytest.raises(ModelError, match="must end an answer with a control token"):
        train(own, print_line=lambda line: None)
    assert not (tmp_path / "run").exists()
