"""From which model, by which stages and on which rows a model came to be, over several runs.

Every finished stage records it in its manifest, so that a stage that starts from a folder of
another run can tell the whole way.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from tandem.checkpoint.beside import manifest_above
from tandem.checkpoint.folder import MANIFEST, read_manifest
from tandem.config.schema import rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import Stage, of_family, sources
from tandem.errors import CheckpointError

if TYPE_CHECKING:
    from tandem.training.run_folder import Run

FACT = "lineage"
"""Its name among a manifest's facts."""
NAMED = "named"
"""The fact that says what a model that a program gave was called."""
UNNAMED = "a model in memory"


class Rows(TypedDict):
    """A data set's rows, and how many of them were the stage's share."""

    name: str
    rows: int
    used: int


class Step(TypedDict):
    """One stage on the way to a model.

    model: its folder. title: the stage's. base: what it started from. root: the model that no stage
    made. titles: of all stages from there on. data: its share of the data, of which an RL stage
    takes as much as its steps need. rewards: what rewarded it. teacher: whose distributions it
    learned, if it did.
    """

    model: str
    title: str
    base: str
    root: str
    titles: list[str]
    data: list[Rows]
    rewards: list[str]
    teacher: NotRequired[str]


def lineage_of(run: Run, stage: Stage) -> list[Step]:
    """All stages that led to the model that the stage makes, those of its reward model or teacher
    too; the stage itself is the last."""
    start = _start(run, stage)
    before = recorded(start)
    reward, teacher = _reward_model(run, stage), ""
    if not stage.rewarded:
        teacher = run.config.reference_model
    accounts = run.rows.ledger.datasets.values() if run.rows else ()
    step = Step(
        model=str(run.path / stage.model_folder),
        title=stage.title,
        base=start if before else _named(start),
        root=before[-1]["root"] if before else _named(start),
        titles=[*(before[-1]["titles"] if before else ()), stage.title],
        data=[
            Rows(name=account.name, rows=account.rows, used=account.used[stage.share])
            for account in accounts
            if account.used[stage.share]
        ],
        rewards=_rewards(run, stage, reward),
    )
    if teacher:
        step["teacher"] = teacher if recorded(teacher) else _named(teacher)
    found: list[Step] = []
    for earlier in (*before, *recorded(reward), *recorded(teacher)):
        if earlier not in found:
            found.append(earlier)
    return [*found, step]


def recorded(model: str) -> list[Step]:
    """What the manifest of a model's folder says; nothing if Tandem did not make it."""
    found = _facts(model).get(FACT, [])
    return found if isinstance(found, list) else []


def _facts(model: str) -> dict[str, object]:
    top = manifest_above(Path(model)) if model else None
    try:
        return {} if top is None else dict(read_manifest(top).facts)
    except CheckpointError:  # a damaged one is refused where the model is loaded
        return {}


def _named(model: str) -> str:
    """The name to show: for a model that a program gave, where it came from; for a folder, its
    whole path, which read from another folder could pass for a hub name."""
    facts = _facts(model)
    name = str(facts[NAMED]) if NAMED in facts else model
    return str(Path(name).absolute()) if name and Path(name).is_dir() else name or UNNAMED


def _start(run: Run, stage: Stage) -> str:
    """The model that the stage starts from."""
    if stage.leaves == "reward model" and run.config.reward_model:
        return run.config.reward_model
    return _left(run, stage, "policy") or run.config.actor_model or run.given_actor


def _reward_model(run: Run, stage: Stage) -> str:
    """The reward model's folder or name; empty without one."""
    rewarded = stage.rewarded and of_family([stage.name], "rl")
    if not rewarded or rl_section(run.config).reward_model_weight == 0:
        return ""
    return "" if run.reward_module else _left(run, stage, "reward model") or run.config.reward_model


def _left(run: Run, stage: Stage, what: str) -> str:
    """The folder of what an earlier stage of this run left for the stage; empty if none did."""
    for source in sources("policy" if what == "policy" else "reward model", stage.name):
        if (run.folder(source.name) / MANIFEST).exists():
            return str(run.path / source.model_folder)
    return ""


def _rewards(run: Run, stage: Stage, reward_model: str) -> list[str]:
    if not stage.rewarded or not of_family([stage.name], "rl"):
        return []
    module = run.reward_module
    return [
        *([f"the torch module {type(module.module).__name__}"] if module else ()),
        *([f"reward model {reward_model}"] if reward_model else ()),
        *(f"reward model {more.source}" for more in weighted_models(
            run.config.scoring.reward_models)),
        *(f"function {name}" for name in rl_section(run.config).reward_function),
    ]  # fmt: skip
