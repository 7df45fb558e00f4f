"""One run's folder: what is finished, what it was made from, where everything goes.

RUN/config.yaml command.txt environment.json data.json metrics.jsonl samples.jsonl ...
RUN/sft/  reward/  dpo/  ppo/{actor,critic,ema}/ ...  finished steps, Hugging Face folders
RUN/checkpoints/STEP/step-N/                          to continue an unfinished step from
"""

from __future__ import annotations

import json
import math
import shutil
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tandem.checkpoint.folder import (
    MANIFEST,
    copy_folder,
    read_facts,
    require_own,
    together,
    write_folder,
)
from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import (
    SavedState,
    State,
    load_newest_state,
    load_state_before,
    newest_numbers,
)
from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tandem.config.stages import Leaves, sources, stage_names
from tandem.engine.devices import resolve_device
from tandem.errors import CheckpointError, ConfigError, DataError, Stopped
from tandem.files import lock
from tandem.files import replace as replace_file
from tandem.metrics.log import MetricLog, MutedLog
from tandem.metrics.records import ALARMS_FILE, METRICS_FILE, SAMPLES_FILE
from tandem.parallel.world import World
from tandem.training.provenance import Identity, environment, origin
from tandem.training.signals import StopSignals
from tandem.training.stage_data import StepRows

SAVE_NOW = "save-now"
"""A file of this name in the run's folder asks for a checkpoint after the running step."""
_CHECKPOINTS = "checkpoints"
COMMAND_FILE = "command.txt"
"""What makes a folder a run's: the first file that is written into it."""
_LOCK_FILE = ".lock"


class Run:
    """The run's folder and configuration.

    Attributes:
        writes: whether it leaves anything in its folder; one that is only looked at does not.
    """

    def __init__(
        self,
        config: RunConfig,
        print_line: Callable[[str], None] = print,
        world: World | None = None,
        *,
        writes: bool = True,
    ) -> None:
        """`print_line` shows a line to the user, on the first rank of `world` (alone if None)."""
        self.writes = writes
        self.config = config
        self.world = world or World(device=resolve_device(config.device))
        self.device = self.world.device
        self.print_line = print_line if self.world.is_first else ignore_line
        self.path = Path(config.output_dir)
        self.identity = Identity(config, self.path, self.world)
        self.stops = StopSignals(self.print_line)
        self._verified: set[str] = set()  # hashing a large model once a run is enough
        self._savers: dict[str, Saver] = {}
        self._lock: BinaryIO | None = None

    def require_own_folder(self) -> None:
        """Refuse a folder that is somebody's and no run's, before anything is written there.

        Raises:
            CheckpointError: it holds other things; the message names one.
        """
        if not self.path.is_dir() or (self.path / COMMAND_FILE).exists():
            return
        # Before a run is, the launcher keeps its ranks' logs there and the demo its base model;
        # steps are checked by themselves.
        own = {"logs", "base", SAVE_NOW, _CHECKPOINTS, *stage_names()}
        others = sorted(
            path.name
            for path in self.path.iterdir()
            if path.name not in own and not path.name.startswith(".")
        )
        if others:
            raise CheckpointError(
                f"--output-dir must be a run's folder, a new one or an empty one; got {self.path} "
                f"with {others[0]!r}{f' and {len(others) - 1} more' if others[1:] else ''}. Choose "
                "another."
            )

    def open(self, command: str) -> None:
        """Make the folder and write down what is about to run.

        Raises:
            CheckpointError: the folder cannot be written, or another run is writing in it.
        """
        together(lambda: self._open(command), self.path, self.world)

    def _open(self, command: str) -> None:
        if not self.world.is_keeper:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Two runs would mix their lines and remove each other's checkpoints.
            self._lock = self._lock or lock(self.path / _LOCK_FILE)
            if self._lock is None:
                raise CheckpointError(
                    f"{self.path} must be written by one run at a time; got another that is "
                    "running in it. Wait until it ends, or use another --output-dir."
                )
            with (self.path / COMMAND_FILE).open("a", encoding="utf-8") as file:
                file.write(command + "\n")
            if self.world.is_first:
                replace_file(self.path / "config.yaml", dump_config(self.config).encode())
                self.write_json("environment.json", environment())
            for step in self.config.stages:  # a kill may come before a finished step's are removed
                if (self.folder(step) / MANIFEST).exists():
                    shutil.rmtree(self._checkpoints(step), ignore_errors=True)
        except OSError as error:
            raise CheckpointError(
                f"--output-dir must be a folder that can be written; got {self.path} "
                f"({error.strerror}). Choose another."
            ) from None

    def close(self) -> None:
        """Let others write in the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def note_data(self, rows: StepRows) -> None:
        """From now on a step counts as finished only if it was made from these rows.

        Raises:
            DataError: ranks have read others.
        """
        digests = [account.fingerprint for account in rows.ledger.datasets.values()]
        num_data, num_sft = len(self.config.data), len(self.config.sft_data)
        self.identity.fingerprints = {
            "data": digests[:num_data],
            "sft_data": digests[num_data : num_data + num_sft],
            "ptx_data": digests[num_data + num_sft :],
        }
        told = self.world.all_gather_object((socket.gethostname(), digests))
        other = next((i for i, (_, theirs) in enumerate(told) if theirs != told[0][1]), None)
        if other is not None:
            raise DataError(
                f"data must be the same rows on every node; got others on {told[other][0]} (rank "
                f"{other}) than on {told[0][0]}. Copy the files from one to all."
            )

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the run's JSON files, replacing it whole; the first rank does."""
        if not self.world.is_first or not self.writes:
            return
        text = json.dumps(value, indent=1, ensure_ascii=False)
        replace_file(self.path / name, text.encode())

    def bring_finished(self) -> None:
        """Bring finished steps to the nodes that lack them, where they share no file system.

        Raises:
            CheckpointError: nodes have different ones, or a disk refuses.
        """
        for step in stage_names():
            together(partial(require_own, self.folder(step)), self.path, self.world)
            if copy_folder(self.folder(step), self.world):
                self.print_line(f"{step}: finished before, copied to the nodes that lacked it")

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
        facts = self.verify(step)
        self.identity.require_same(step, self.folder(step), facts["made_from"])
        return True

    def verify(self, step: str) -> dict[str, Any]:
        """The facts of a finished step, whose files are read and verified once a run.

        Raises:
            CheckpointError: its folder is damaged.
        """
        verify = step not in self._verified
        facts = read_facts(self.folder(step), verify=verify, world=self.world)
        self._verified.add(step)
        return facts

    def require_continuable(self, step: str) -> None:
        """Refuse, before anything is written, to continue checkpoints of other knobs or rows.

        Raises:
            CheckpointError: the newest was made with others.
        """
        numbers = newest_numbers(self._checkpoints(step), self.world)
        if numbers is not None:
            self.identity.require_same(step, self._checkpoints(step), numbers["made_from"])

    def finish(self, step: str, fill: Callable[[Path], None], facts: Mapping[str, float]) -> None:
        """Write the step's outcome, whole or not at all, and drop its checkpoints.

        Args:
            fill: writes into the folder it is given; every rank calls it, the first writes.
        """
        saver = self._savers.pop(step, None)
        try:
            if saver is not None:
                saver.wait()
        except CheckpointError as error:
            self.print_line(f"{step}: {error}")  # the outcome itself is about to be written
        known = {
            **finite(facts),
            **origin(self.config, self.world),
            "made_from": self.identity.made_from(step),
        }
        write_folder(self.folder(step), fill, known, world=self.world)
        if self.world.is_keeper:
            shutil.rmtree(self._checkpoints(step), ignore_errors=True)

    def save(self, step: str, state: State) -> None:
        """Keep a checkpoint of an unfinished step, written beside the training that goes on.

        Raises:
            CheckpointError: the disk refused the one before, or has no room; that is intact.
            NumericsError: a value in it is not finite.
        """
        if not self.writes:
            return
        if step not in self._savers:
            self._savers[step] = Saver(
                self._checkpoints(step),
                keep=self.config.keep_checkpoints,
                world=self.world,
                beside=self.config.save_async,
            )
        numbers = {**state.numbers, "made_from": self.identity.made_from(step)}
        # A line of a step that is in the checkpoint is written once, so it must be on the disk.
        logs = [self.path / name for name in (METRICS_FILE, SAMPLES_FILE, ALARMS_FILE)]
        state = State(state.step, state.tensors, numbers)
        self._savers[step].save(state, origin(self.config, self.world), synced=logs)

    def finish_saving(self, step: str) -> None:
        """Until the checkpoint that is under way, if one is, is on the disk.

        Raises:
            CheckpointError: the disk refused it; older ones are intact.
        """
        if step in self._savers:
            self._savers[step].wait()

    def load(self, step: str, before: int | None = None) -> SavedState | None:
        """The newest whole checkpoint of an unfinished step.

        Args:
            before: of those from before this optimizer step, to do that one again.
        Raises:
            CheckpointError: it was made with other knobs or inputs.
        """
        folder = self._checkpoints(step)
        if before is None:
            state, notes = load_newest_state(folder, self.world)
        else:
            state, notes = load_state_before(folder, before, self.world)
        for note in notes:
            self.print_line(note)
        if before is not None:
            done = 0 if state is None else state.step
            source = "the beginning" if state is None else f"the checkpoint after {done}"
            again = f", steps {done + 1} to {before - 1} again first" if done + 1 < before else ""
            self.print_line(f"{step}: from {source}{again}")
            return state
        if state is not None:
            self.identity.require_same(step, self._checkpoints(step), state.numbers["made_from"])
            self.print_line(f"{step}: continuing after step {state.step} (checkpoint verified)")
        return state

    def stop_if_asked(self, where: str) -> None:
        """Between two of the run's steps: stop if a signal came, else let the next end at once.

        Raises:
            Stopped: it came; on every rank if on any.
        """
        number = int(self.world.all_reduce_max([self.stops.requested])[0])
        if number:
            raise Stopped(number, where)
        self.stops.deferring = False

    def metric_log(
        self, step: str, num_steps: int, start: int, thresholds: Mapping[str, float] | None = None
    ) -> MetricLog | MutedLog:
        """Where the step's metrics go; `start` steps are done. See MetricLog for thresholds."""
        if not self.world.is_first or not self.writes:
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

    def policy_source(self, step: str = "") -> str:
        """The model that a step starts from: that of the first finished step before it (`after` in
        its record) that leaves a policy, else the given.

        Args:
            step: whose start; empty: that of whichever step starts from another.
        Raises:
            ConfigError: there is neither.
        """
        if trained := self.trained("policy", step):
            return trained
        if not self.config.actor_model:
            none = " or ".join(stage.name for stage in sources("policy", step))
            raise ConfigError(
                f"--actor-model must name a model, for {self.path} has no finished {none} step; "
                "got nothing. Give a folder or a hub name."
            )
        return self.config.actor_model

    def reward_source(self, step: str = "") -> str | None:
        """The reward model for a step (empty: any): that of the step before it which trains one,
        if that is finished, else the given, else None."""
        return self.trained("reward model", step) or self.config.reward_model or None

    def trained(self, what: Leaves, step: str = "") -> str | None:
        """The folder of the policy or reward model that a finished step of this run has left for
        `step` (empty: for any); None where no such step is finished.

        Raises:
            CheckpointError: a step was finished with other knobs, or its folder is damaged.
        """
        for stage in sources(what, step):
            if self.is_finished(stage.name):
                return str(self.path / stage.model_folder)
        return None

    def _checkpoints(self, step: str) -> Path:
        return self.path / _CHECKPOINTS / step


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON can say."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def ignore_line(line: str) -> None:
    """What the other ranks say."""
