"""Lengths of rows before a run, against those that the run itself renders."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.errors import DataError
from tandem.plan.lengths import rows_by_stage
from tandem.predict.rows import Rows
from tandem.training.stage_data import prepare_rows
from tests.jsonl import write_jsonl
from tests.tiny import save_tiny_model, tiny_config, write_preferences

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '[system]You are a helpful assistant, and say so at every opportunity.[end]\n' }}"
    "{% endif %}"
    "{{ '[' + message['role'] + ']' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "system", "own"),
    [
        (CHATML, "", ""),
        (CHATML, "Be brief.", ""),
        ("", "Be brief.", ""),
        ("", "", ""),
        (CHATML, "", "none"),
        (CHATML, "Be brief.", "default"),
        ("", "", "FILE"),
    ],
)
def test_lengths_are_those_of_the_rows_that_a_run_trains_on(
    template: str, system: str, own: str, tmp_path: Path
) -> None:
    model = Path(save_tiny_model(tmp_path / "model"))
    if template:
        (model / "chat_template.jinja").write_text(template)
    data = write_preferences(tmp_path / "prefs.jsonl")
    (tmp_path / "mine.jinja").write_text(CHATML)
    limits = {"max_tokens": 400, "max_prompt_tokens": 300, "system_prompt": system}
    limits["chat_template"] = own.replace("FILE", str(tmp_path / "mine.jinja"))
    config = tiny_config(tmp_path / "run", str(model), data, dataset=limits)
    rows = prepare_rows(config, str(model), str(model))
    found = rows_by_stage(config, str(model))
    prompts = [len(prompt) for prompt in rows.prompts]
    texts = [len(row.token_ids) for row in rows.sft]
    assert found["ppo"].count == len(prompts)
    assert found["ppo"].tokens == pytest.approx(sum(prompts) / len(prompts), abs=1)
    assert found["ppo"].longest == pytest.approx(max(prompts), abs=1)
    assert found["sft"].tokens == pytest.approx(sum(texts) / len(texts), abs=2)
    tokens = sorted(tuple(prompt.token_ids) for prompt in rows.prompts)
    common = [
        next(i for i in range(len(b)) if a[: i + 1] != b[: i + 1]) for a, b in pairwise(tokens)
    ]
    assert found["ppo"].alike == sorted(common)[(len(common) - 1) // 2] // 16 * 16


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_rows_over_the_limits_are_left_as_the_run_leaves_them(policy: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    rows = [
        {
            "prompt": [
                {"role": "user", "content": f"{number} " + "word " * 30},
                {"role": "assistant", "content": "yes " * (1 + number % 40)},
                {"role": "user", "content": "word " * (1 + number % 60)},
            ],
            "chosen": f"yes {number} " * (1 + number % 20),
            "rejected": f"no {number} " * 3,
        }
        for number in range(240)
    ]
    data = tmp_path / "long.jsonl"
    write_jsonl(data, rows)
    limits = {"max_tokens": 200, "max_prompt_tokens": 60, "on_long_row": policy, "heldout": 0.0}
    config = tiny_config(tmp_path / "run", model, str(data), dataset=limits)
    made, found = prepare_rows(config, model, model), rows_by_stage(config, model)
    prompts, texts = [len(row) for row in made.prompts], made.sft
    assert 0 < len(prompts) < 105
    assert found["ppo"].count == pytest.approx(len(prompts), abs=1)
    assert found["ppo"].tokens == pytest.approx(sum(prompts) / len(prompts), abs=1)
    assert found["sft"].count == pytest.approx(len(texts), abs=1)
    assert found["sft"].tokens == pytest.approx(sum(map(len, texts)) / len(texts), abs=2)
    answered = sum(sum(row.response_mask) for row in texts) / len(texts)
    assert found["sft"].answered == pytest.approx(answered, abs=3)
    assert found["reward"].count == pytest.approx(len(made.pairs), abs=1)
    limits |= {"max_prompt_tokens": 8, "on_long_row": "drop"}
    config = tiny_config(tmp_path / "run", model, str(data), dataset=limits)
    with pytest.raises(DataError, match=r"stage ppo must have at least one row; got none: all"):
        rows_by_stage(config, model)


def test_a_template_that_cannot_be_rendered_counts_a_few_tokens_a_turn(tmp_path: Path) -> None:
    model = Path(save_tiny_model(tmp_path / "model"))
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(tmp_path / "run", str(model), data)
    found = []
    for template in ("{{ raise_exception('no') }}", "{% broken", "{% for i in range(10**9) %}x"):
        (model / "chat_template.jinja").write_text(template)
        found.append(rows_by_stage(config, str(model))["ppo"].tokens)
    assert len(set(found)) == 1
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "no"}]
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    assert rows_by_stage(config, str(model))["ppo"].tokens > found[0] + 10


def test_held_out_rows_are_those_that_the_run_evaluates_on(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    data = write_preferences(tmp_path / "prefs.jsonl", 240)
    stages = {"stages": ["sft", "kto"], "dataset__heldout": 0.4, "dataset__eval_rows": 0}
    config = tiny_config(tmp_path / "run", model, data, **stages)
    config = replace(config, ppo=replace(config.ppo, ptx_data=(data,)))
    for names in (("sft", "kto"), ("sft", "reward", "ppo")):
        config = replace(config, stages=names)
        made, found = prepare_rows(config, model, model), rows_by_stage(config, model)
        heldout = found["sft"].heldout
        assert heldout is not None
        assert heldout == found[names[-1]].heldout
        scored = [s for pair in made.heldout_pairs for s in (pair.chosen, pair.rejected)]
        assert len(made.heldout_sft) > 60
        for own, rows in (
            (heldout.texts, made.heldout_sft),
            (heldout.pairs, scored),
            (heldout.prompts, made.heldout_prompts),
        ):
            lengths = [len(row) for row in rows]
            assert own.count == len(rows)
            assert own.tokens == pytest.approx(sum(lengths) / len(rows), abs=1)
        assert heldout.graded == Rows()
        assert "ppo" not in names or heldout.ptx.count == len(made.heldout_ptx) > 60
        if made.heldout_labelled:
            assert heldout.labelled.count == len(made.heldout_labelled)
            whole = sum(len(row.answer) for row in made.heldout_labelled)
            assert heldout.labelled.cost == pytest.approx(whole / heldout.labelled.count, abs=1)
            assert heldout.labelled.tokens < heldout.labelled.cost  # a prompt counts once
    assert rows_by_stage(replace(config, data=()), model)["sft"].heldout is None
