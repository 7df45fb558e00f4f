"""One run's folder: what is finished, what it was made from, where everything goes.

RUN/config.yaml command.txt environment.json data.json metrics.jsonl samples.jsonl ...
RUN/sft/  reward/  dpo/  ppo/{actor,critic,ema}/      finished steps, Hugging Face folders
RUN/checkpoints/STEP/step-N/                          to continue an unfinished step from
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.checkpoint.folder import MANIFEST, read_facts, require_own, write_folder
from tandem.checkpoint.state import State, load_newest_state, newest_numbers, save_state
from tandem.config.load import config_knobs, dump_config
from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.engine.devices import resolve_device
from tandem.errors import CheckpointError, ConfigError, Stopped
from tandem.metrics.log import MetricLog, MutedLog
from tandem.models.save import save_model
from tandem.parallel.pieces import whole
from tandem.parallel.shard import shards_of
from tandem.parallel.world import World
from tandem.train.rows import StepRows
from tandem.train.signals import StopSignals

# What each step's outcome depends on: these knobs and whole sections.
_SHARED = ("seed", "dtype", "dropout", "dataset", "lora", "data", "guards")
DEPENDS_ON: dict[str, tuple[str, ...]] = {
    "sft": (*_SHARED, "actor_model", "sft_data", "sft"),
    "reward": (*_SHARED, "reward_model", "reward", "sampling"),
    "dpo": (*_SHARED, "dpo"),
    "ppo": (*_SHARED, "ppo", "sampling"),
}
# These change what is measured or shown on the way, never what comes out.
_HARMLESS = ("eval_every", "eval_prompts")


class Run:
    """The run's folder and configuration."""

    def __init__(
        self,
        config: RunConfig,
        say: Callable[[str], None] = print,
        world: World | None = None,
    ) -> None:
        """`say` shows a line to the user, on the first rank of `world` (alone if None)."""
        self.config = config
        self.world = world or World(device=resolve_device(config.device))
        self.device = self.world.device
        self.say = say if self.world.is_first else _say_nothing
        self.path = Path(config.output_dir)
        self.fingerprints: dict[str, list[str]] = {}
        self.stops = StopSignals(self.say)
        self._verified: set[str] = set()  # hashing a large model once a run is enough

    def open(self, command: str) -> None:
        """Make the folder and write down what is about to run.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        if not self.world.is_first:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(dump_config(self.config), encoding="utf-8")
            with (self.path / "command.txt").open("a", encoding="utf-8") as file:
                file.write(command + "\n")
            self.write_json("environment.json", environment())
        except OSError as error:
            raise CheckpointError(
                f"--output-dir must be a folder that can be written; got {self.path} "
                f"({error.strerror}). Choose another."
            ) from None

    def note_data(self, rows: StepRows) -> None:
        """From now on a step counts as finished only if it was made from these rows."""
        digests = [account.fingerprint for account in rows.ledger.datasets.values()]
        num_data, num_sft = len(self.config.data), len(self.config.sft_data)
        self.fingerprints = {
            "data": digests[:num_data],
            "sft_data": digests[num_data : num_data + num_sft],
        }

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the run's JSON files, replacing it whole; the first rank does."""
        if not self.world.is_first:
            return
        aside = self.path / f".{name}.tmp"
        aside.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
        aside.replace(self.path / name)

    def folder(self, step: str) -> Path:
        """Where a finished step's model is."""
        return self.path / step

    def is_finished(self, step: str) -> bool:
        """Whether the step was finished, with the knobs and inputs that it would have now.

        Raises:
            CheckpointError: it was finished with others, or its folder is damaged.
        """
        require_own(self.folder(step))
        if not (self.folder(step) / MANIFEST).exists():
            return False
        facts = read_facts(self.folder(step), verify=step not in self._verified)
        self._verified.add(step)
        self._require_same(step, self.folder(step), facts["made_from"])
        return True

    def require_continuable(self, step: str) -> None:
        """Refuse, before anything is written, to continue checkpoints of other knobs or rows.

        Raises:
            CheckpointError: the newest was made with others.
        """
        numbers = newest_numbers(self._checkpoints(step))
        if numbers is not None:
            self._require_same(step, self._checkpoints(step), numbers.get("made_from", {}))

    def finish(self, step: str, fill: Callable[[Path], None], facts: Mapping[str, float]) -> None:
        """Write the step's outcome, whole or not at all, and drop its checkpoints.

        Args:
            fill: writes into the folder it is given; every rank calls it, the first writes.
        """
        made_from = self.made_from(step)
        figures = {k: v for k, v in facts.items() if math.isfinite(v)}
        known = {**figures, "made_from": made_from}
        write_folder(self.folder(step), fill, known, world=self.world)
        if self.world.is_first:
            shutil.rmtree(self._checkpoints(step), ignore_errors=True)

    def save(self, step: str, state: State) -> None:
        """Keep a checkpoint of an unfinished step."""
        numbers = {**state.numbers, "made_from": self.made_from(step)}
        state = State(state.step, state.tensors, numbers)
        keep = self.config.keep_checkpoints
        save_state(self._checkpoints(step), state, keep=keep, world=self.world)

    def load(self, step: str) -> State | None:
        """The newest whole checkpoint of an unfinished step.

        Raises:
            CheckpointError: it was made with other knobs or inputs.
        """
        state, notes = load_newest_state(self._checkpoints(step))
        for note in notes:
            self.say(note)
        if state is not None:
            self._require_same(step, self._checkpoints(step), state.numbers["made_from"])
            self.say(f"{step}: continuing after step {state.step} (checkpoint verified)")
        return state

    def stop_if_asked(self, where: str) -> None:
        """Between two of the run's steps: stop if a signal came, else let the next end at once.

        Raises:
            Stopped: it came; on every rank if on any.
        """
        number = int(self.world.largest([self.stops.requested])[0])
        if number:
            raise Stopped(number, where)
        self.stops.deferring = False

    def metric_log(
        self, step: str, num_steps: int, start: int, thresholds: Mapping[str, float] | None = None
    ) -> MetricLog | MutedLog:
        """Where the step's metrics go; `start` steps are done. See MetricLog for thresholds."""
        if not self.world.is_first:
            return MutedLog()
        return MetricLog(
            self.path,
            step,
            num_steps,
            tensorboard=self.config.log.tensorboard,
            wandb=self.config.log.wandb,
            start_step=start,
            thresholds=thresholds,
        )

    def policy_source(self) -> str:
        """The model that steps 2 and 3 start from: step 1's if it is finished, else the given.

        Raises:
            ConfigError: there is neither.
        """
        if self.is_finished("sft"):
            return str(self.folder("sft"))
        if not self.config.actor_model:
            raise ConfigError(
                f"--actor-model must name a model, for {self.path} has no finished sft step; "
                "got nothing. Give a folder or a hub name."
            )
        return self.config.actor_model

    def reward_source(self) -> str | None:
        """The reward model for step 3: step 2's if it is finished, else the given, else None."""
        if self.is_finished("reward"):
            return str(self.folder("reward"))
        return self.config.reward_model or None

    def made_from(self, step: str) -> dict[str, Any]:
        """What the step's outcome depends on: knobs by dotted name, and earlier steps' digests."""
        knobs = {
            name: _json_value(_knob_value(self.config, name))
            for name, _ in config_knobs()
            if name.split(".")[0] in DEPENDS_ON[step] and name.split(".")[-1] not in _HARMLESS
        }
        earlier = {"sft": (), "reward": ("sft",), "dpo": ("sft",), "ppo": ("sft", "reward")}[step]
        script = Path(self.config.ppo.reward_function.rpartition(":")[0])
        if step == "ppo" and script.is_file():
            knobs["the reward function"] = hashlib.sha256(script.read_bytes()).hexdigest()
        for kind in ("data", "sft_data") if step == "sft" else ("data",):
            if kind in self.fingerprints:
                knobs[f"the rows of {kind}"] = self.fingerprints[kind]
        for name in earlier:
            manifest = self.folder(name) / MANIFEST
            if manifest.exists():
                weights = json.loads(manifest.read_text(encoding="utf-8"))["files"]
                knobs[f"the {name} step"] = {
                    path: facts["sha256"]
                    for path, facts in weights.items()
                    if path.endswith(".safetensors")
                }
            elif name == "sft":
                knobs["actor_model"] = self.config.actor_model
            else:
                knobs["reward_model"] = self.config.reward_model
        return knobs

    def _checkpoints(self, step: str) -> Path:
        return self.path / "checkpoints" / step

    def _require_same(self, step: str, where: Path, before: Mapping[str, Any]) -> None:
        now = self.made_from(step)
        changed = [
            f"{name} {_short(before.get(name))} -> {_short(now.get(name))}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
            # Rows are compared once they have been read.
            and not (name.startswith("the rows of") and name not in now)
        ]
        if changed:
            raise CheckpointError(
                f"{where} was made with other knobs or rows than these; changed: "
                f"{', '.join(changed)}. To redo this step alone, remove {where}; to keep it, use "
                "another --output-dir."
            )


def _say_nothing(line: str) -> None:
    """What the other ranks say."""


def with_template(tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> Any:
    """The tokenizer with the chat template in use, where it brought none."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = renderer.chat_template
    return tokenizer


def save_policy(model: PreTrainedModel, rows: StepRows, folder: Path) -> None:
    """Save a policy so that anyone's `generate` stops where it was taught to stop, with the chat
    template that it was taught."""
    tokenizer = with_template(rows.tokenizer, rows.renderer)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(rows.renderer.stop_token_ids)
        model.generation_config.pad_token_id = rows.renderer.pad_token_id
    save_anywhere(model, tokenizer, folder)


def save_anywhere(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """`models.save.save_model`, wherever the weights lie: all ranks call it, the first writes."""
    shards = shards_of(model)
    shards.rest()
    save_model(model, tokenizer, folder, whole=whole, writes=shards.world.is_first)


def environment() -> dict[str, str]:
    """Versions and hardware, for the report and for bug reports."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "gpu": gpu,
        "threads": str(torch.get_num_threads()),
    }


def _knob_value(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _json_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    return "(others)" if isinstance(value, dict) else json.dumps(value)[:60]
