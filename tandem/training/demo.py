"""`tandem demo`: all three steps on the built-in data set, judged by a rule nobody trained on.

A small Llama starts from new weights with its own tokenizer, so nothing is needed from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.data.embedded import build_tokenizer, demo_config, judge, model_config
from tandem.engine.scoring import place_scorer
from tandem.metrics.report import write_report
from tandem.models.load import load_causal_lm, load_tokenizer, new_causal_lm
from tandem.models.save import save_model
from tandem.text import visible_lines
from tandem.training.comparing.compare import answer, first_of_each, policies
from tandem.training.own_folder import require_run_folder
from tandem.training.run_folder import Run
from tandem.training.run_stages import tokenizer_sources, train
from tandem.training.stage_data import StepRows, prepare_rows
from tandem.types import PairRow, PromptRow


def demo(output_dir: str) -> dict[str, dict[str, float]]:
    """Run the demo in `output_dir`, judge its models, and show some of their answers.

    Returns:
        the rule's verdict on each model: {label: {"form", "content", "manner", "score"}}, shares
        and means over held-out prompts.
    Raises:
        CheckpointError: the folder is not a run's, or cannot be written.
    """
    console = Console()
    require_run_folder(Path(output_dir))
    base = Path(output_dir) / "base"
    config = demo_config(output_dir, str(base))
    if not (base / "config.json").exists():
        tokenizer = build_tokenizer()
        save_model(new_causal_lm(model_config(tokenizer), seed=config.seed), tokenizer, base)
    run = train(config, command=f"tandem demo --output-dir {output_dir}")
    rows = run.rows or prepare_rows(run.config, *tokenizer_sources(run))
    judged = judge_policies(run, rows)
    agreement = rule_agreement(run, rows)
    _add_to_report(run, judged, agreement)
    console.print(_table(judged))
    console.print(f"The reward model agrees with the rule on {agreement:.1%} of held-out pairs.")
    for shown in _talk(config, run, rows):
        console.print(shown)
    console.print(f"\nreport: {run.path / 'report.html'}\nchat:   tandem chat {run.path}")
    return judged


def _add_to_report(run: Run, judged: dict[str, dict[str, float]], agreement: float) -> None:
    """Add the rule's verdict to the report."""
    path = run.path / "evaluation.json"
    evaluation = json.loads(path.read_text(encoding="utf-8"))
    for label, verdict in judged.items():
        evaluation["models"][label] |= {f"rule: {name}": v for name, v in verdict.items()}
    evaluation["models"]["reward model"]["rule: agreement"] = agreement
    run.write_json("evaluation.json", evaluation)
    write_report(run.path)


def judge_policies(run: Run, rows: StepRows) -> dict[str, dict[str, float]]:
    """The hidden rule on every policy's sampled answers to all held-out prompts."""
    judged = {}
    for label, source in policies(run):
        rollout = answer(load_causal_lm(source), rows.heldout_prompts, rows, run.settings)
        verdicts = [
            judge(prompt.messages[-1].content, response)
            for prompt, response in zip(rollout.prompts, rollout.responses, strict=True)
        ]
        judged[label] = {
            name: sum(float(getattr(verdict, name)) for verdict in verdicts) / len(verdicts)
            for name in ("form", "content", "manner", "score")
        }
    return judged


def rule_agreement(run: Run, rows: StepRows) -> float:
    """Share of held-out pairs that the reward model ranks as the rule does."""
    source = run.reward_source()
    assert source is not None  # the demo trains one
    scorer = place_scorer(run.placement, source, load_tokenizer(source))
    chosen, rejected = (scorer.raw_rows(side) for side in _sides(rows.heldout_pairs))
    return float((chosen > rejected).float().mean())


def _sides(pairs: Sequence[PairRow]) -> tuple[list[Any], list[Any]]:
    return [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]


def _talk(config: RunConfig, run: Run, rows: StepRows) -> list[Table]:
    """A few held-out prompts with the models' answers."""
    held_out = rows.heldout_prompts
    prompts: list[PromptRow] = [held_out[place] for place in first_of_each(held_out, 4)]
    models = dict(policies(run))
    trained = [policy.label for stage in config.stages for policy in stage_of(stage).policies[:1]]
    chosen = {label: models[label] for label in ("base", *trained) if label in models}
    answers = {
        label: answer(load_causal_lm(source), prompts, rows, run.settings).responses
        for label, source in chosen.items()
    }
    return [
        answer_table(
            prompt.messages[-1].content, {name: found[i] for name, found in answers.items()}
        )
        for i, prompt in enumerate(prompts)
    ]


def answer_table(prompt: str, answers: Mapping[str, str]) -> Table:
    """A prompt, with each model's answer and the rule's score of it.

    An untrained model writes any characters: those that would steer a terminal are escaped.
    """
    table = Table(title=Text(visible_lines(prompt)), title_justify="left")
    table.add_column("model")
    table.add_column("answer", overflow="fold")
    table.add_column("rule", justify="right")
    for label, text in answers.items():
        table.add_row(label, Text(visible_lines(text)), f"{judge(prompt, text).score:.2f}")
    return table


def _table(judged: dict[str, dict[str, float]]) -> Table:
    table = Table(title="The hidden rule on held-out prompts", title_justify="left")
    table.add_column("model")
    for name in ("form", "content", "manner", "score"):
        table.add_column(name, justify="right")
    for label, values in judged.items():
        table.add_row(label, *(f"{value:.3f}" for value in values.values()))
    return table
