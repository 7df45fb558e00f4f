"""One run's folder: finished stages, what they were made from, and all other files.

RUN/config.yaml command.txt environment.json data.json metrics.jsonl samples.jsonl ...
RUN/sft/  reward/  dpo/  ppo/{actor,critic,ema}/ ...  finished stages, Hugging Face folders
RUN/checkpoints/STAGE/step-N/                         to continue an unfinished stage from
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

from tandem.checkpoint.folder import MANIFEST, copy_folder, read_facts, require_own, together
from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import (
    SavedState,
    State,
    load_newest_state,
    load_state_before,
    newest_numbers,
)
from tandem.config.engine import EngineSettings, engine_settings
from tandem.config.load import dump_config
from tandem.config.recorded import ENVIRONMENT_FILE, places
from tandem.config.schema import RunConfig
from tandem.config.stages import Leaves, sources, stage_names, stage_of
from tandem.devices import ask_for_determinism, resolve_device
from tandem.engine.module_scorer import RewardModule
from tandem.engine.placement import Placement
from tandem.errors import CheckpointError, ConfigError, DataError, Stopped
from tandem.files import remove_left
from tandem.files import replace as replace_file
from tandem.metrics.answers import LINE_FILES
from tandem.metrics.log import MetricLog, MutedLog
from tandem.ops.arithmetic import computed_by
from tandem.parallel.world import World
from tandem.text import ignore_line
from tandem.training import own_folder
from tandem.training.callbacks import Callback
from tandem.training.differences import known_rows
from tandem.training.lineage import lineage_of
from tandem.training.model_card import write_models
from tandem.training.own_folder import CHECKPOINTS, COMMAND_FILE, not_writable, require_run_folder
from tandem.training.own_templates import keep_template
from tandem.training.provenance import Identity, environment, origin
from tandem.training.signals import StopSignals
from tandem.training.stage_data import StepRows

_BY = "computed_by"


class Run:
    """The run's folder and configuration.

    Attributes:
        writes: whether it writes into its folder; `tandem replay` does not.
        callbacks: hear of rollouts, steps, evaluations and saves.
        reward_module: a torch module that scores answers in place of a reward model.
        beside, judge: further policies by label, and a reward model in place of the run's, in an
            evaluation (`beside`).
        stopped: why a callback stopped it; empty if none did.
        command: that repeats it. given_actor: the actor's name, if a program made the engine.
    """

    def __init__(
        self,
        config: RunConfig,
        print_line: Callable[[str], None] = print,
        world: World | None = None,
        *,
        writes: bool = True,
    ) -> None:
        """`print_line` shows the user a line, on the first rank of `world` (None: one process)."""
        self.writes = writes
        self.config = config
        self.world = world or World(device=resolve_device(config.device))
        self.device = self.world.device
        if config.deterministic or not writes:  # a replay compares with what was recorded
            ask_for_determinism(self.device, strict=config.deterministic)
        self.print_line = print_line if self.world.is_first else ignore_line
        self.path = Path(config.output_dir)
        self.identity = Identity(config, self.path, self.world)
        self.stops = StopSignals(self.print_line)
        self.callbacks: Sequence[Callback] = ()
        self.reward_module: RewardModule | None = None
        self.beside: dict[str, str] = {}
        self.judge = ""
        self.stopped = ""
        self.command = ""
        self.given_actor = ""
        self._verified: set[str] = set()  # a large model is hashed only once per run
        self.rows: StepRows | None = None  # what it trains on, once it is read
        self._savers: dict[str, Saver] = {}
        self._lock: BinaryIO | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def settings(self) -> EngineSettings:
        """What the engine reads of the configuration."""
        return engine_settings(self.config)

    @cached_property
    def placement(self) -> Placement:
        """Places the run's models.

        Raises:
            ConfigError: knobs that contradict each other, or that these ranks cannot satisfy.
        """
        return Placement(self.settings, self.world)

    def require_own_folder(self) -> None:
        """Refuse a folder that is not a run's, or that cannot be written, before anything is
        written there; all ranks together.

        Raises:
            CheckpointError: as `own_folder.require_run_folder`, or it cannot be written.
        """
        together(lambda: require_run_folder(self.path, self.world.is_keeper), self.path, self.world)

    def open(self, command: str) -> None:
        """Create the folder, and record the command and configuration.

        Raises:
            CheckpointError: the folder cannot be written, or another run is writing in it.
        """
        self.command = command
        together(lambda: self._open(command), self.path, self.world)

    def _open(self, command: str) -> None:
        if not self.world.is_keeper:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock or own_folder.hold(self.path)
            remove_left(self.path, (".yaml", ".json", ".jinja", ".html"))
            with (self.path / COMMAND_FILE).open("a", encoding="utf-8") as file:
                file.write(command + "\n")
            keep_template(self.config)
            if self.world.is_first:
                replace_file(self.path / "config.yaml", dump_config(self.config).encode())
                self.write_json(ENVIRONMENT_FILE, {**environment(), **places(self.config)})
            for stage in self.config.stages:  # the run may have been killed before it removed them
                if (self.folder(stage) / MANIFEST).exists():
                    shutil.rmtree(self.checkpoints(stage), ignore_errors=True)
        except OSError as error:
            raise not_writable(self.path, str(error.strerror)) from None

    def require_there(self) -> None:
        """Refuse to write on where the folder was taken away meanwhile; all ranks together.

        Raises:
            CheckpointError: on some node it was; nothing more is written.
        """
        try:
            own_folder.require_held(self._lock, self.path, self.world)
        except CheckpointError:
            self.writes = False
            raise

    def close(self) -> None:
        """Release the folder to other runs."""
        for saver in self._savers.values():
            saver.leave()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def note_data(self, rows: StepRows) -> None:
        """From now on a stage counts as finished only if it was made from these rows.

        Raises:
            DataError: the ranks have read different rows.
        """
        self.rows = rows
        digests = [account.fingerprint for account in rows.ledger.datasets.values()]
        self.identity.note_rows(digests)
        self.identity.known_rows = known_rows(self.path / "data.json", rows.ledger)
        told = self.world.all_gather_object((socket.gethostname(), digests))
        other = next((i for i, (_, theirs) in enumerate(told) if theirs != told[0][1]), None)
        if other is not None:
            raise DataError(
                f"data must be the same rows on every node; got others on {told[other][0]} (rank "
                f"{other}) than on {told[0][0]}. Copy the files from one to all."
            )

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the run's JSON files atomically, on the first rank."""
        if not self.world.is_first or not self.writes:
            return
        text = json.dumps(value, indent=1, ensure_ascii=False)
        replace_file(self.path / name, text.encode())

    def bring_finished(self) -> None:
        """Copy finished stages to the nodes that lack them, if nodes share no file system.

        Raises:
            CheckpointError: nodes have different ones, or a disk fails.
        """
        for stage in stage_names():
            together(partial(require_own, self.folder(stage)), self.path, self.world)
            if copy_folder(self.folder(stage), self.world):
                self.print_line(f"{stage}: finished before, copied to the nodes that lacked it")

    def folder(self, stage: str) -> Path:
        """The folder of a finished stage."""
        return self.path / stage

    def is_finished(self, stage: str) -> bool:
        """Whether the stage was finished, with the same knobs and inputs as now.

        Raises:
            CheckpointError: it was finished with others, or its folder is damaged.
        """
        require_own(self.folder(stage))
        if not (self.folder(stage) / MANIFEST).exists():
            return False
        facts = self.verify(stage)
        self.identity.require_same(stage, self.folder(stage), facts["made_from"])
        return True

    def verify(self, stage: str) -> dict[str, Any]:
        """The facts of a finished stage, whose files are verified once per run.

        Raises:
            CheckpointError: its folder is damaged.
        """
        verify = stage not in self._verified
        facts = read_facts(self.folder(stage), verify=verify, world=self.world)
        self._verified.add(stage)
        return facts

    def require_continuable(self, stage: str) -> None:
        """Refuse to continue checkpoints of other knobs or rows, before anything is written.

        Raises:
            CheckpointError: the newest was made with others.
        """
        numbers = newest_numbers(self.checkpoints(stage), self.world)
        if numbers is not None:
            self.identity.require_same(stage, self.checkpoints(stage), numbers["made_from"])

    def finish(self, stage: str, fill: Callable[[Path], None], facts: Mapping[str, float]) -> None:
        """Write the stage's folder atomically, and remove its checkpoints.

        Args:
            fill: writes into the folder that it is given; every rank calls it.
        """
        self.require_there()
        saver = self._savers.pop(stage, None)
        try:
            if saver is not None:
                saver.wait()
        except CheckpointError as error:
            self.print_line(f"{stage}: {error}")  # the stage's own folder is about to be written
        lineage = lineage_of(self, stage_of(stage))
        made_from = {"made_from": self.identity.made_from(stage)}
        write_models(self, stage, self.folder(stage), fill, facts, lineage, made_from)
        if self.world.is_keeper:
            shutil.rmtree(self.checkpoints(stage), ignore_errors=True)

    def save(self, stage: str, state: State) -> None:
        """Save a checkpoint of an unfinished stage, in the background.

        Raises:
            CheckpointError: the previous one failed, or the disk is full; older ones are intact.
            NumericsError: a value in it is not finite.
        """
        if not self.writes:
            return
        self.require_there()
        if stage not in self._savers:
            self._savers[stage] = Saver(
                self.checkpoints(stage),
                keep=self.config.keep_checkpoints,
                world=self.world,
                beside=self.config.save_async,
            )
        facts = {"made_from": self.identity.made_from(stage), _BY: computed_by(self.device)}
        # Lines of steps before the checkpoint are not written again, so they must be on disk.
        logs = [self.path / name for name in LINE_FILES]
        state = State(state.step, state.tensors, {**state.numbers, **facts}, state.best)
        self._savers[stage].save(state, origin(self.config, self.world), synced=logs)

    def finish_saving(self, stage: str) -> None:
        """Wait until a checkpoint that is being written is on disk.

        Raises:
            CheckpointError: the disk failed; older checkpoints are intact.
        """
        if stage in self._savers:
            self._savers[stage].wait()

    def load(self, stage: str, before: int | None = None) -> SavedState | None:
        """The newest complete checkpoint of an unfinished stage.

        Args:
            before: only checkpoints from before this optimizer step, to repeat it.
        Raises:
            CheckpointError: it was made with other knobs or inputs.
        """
        folder = self.checkpoints(stage)
        if before is None:
            state, notes = load_newest_state(folder, self.world)
        else:
            state, notes = load_state_before(folder, before, self.world)
        by, now = None if state is None else state.numbers.get(_BY), computed_by(self.device)
        if by not in (None, now):  # None: of an earlier version
            notes.append(f"{stage}: note: computed by {by}, from here by {now}: last bits differ")
        for note in notes:
            self.print_line(note)
        if before is not None:
            done = 0 if state is None else state.step
            source = "the beginning" if state is None else f"the checkpoint after {done}"
            again = f", steps {done + 1} to {before - 1} again first" if done + 1 < before else ""
            self.print_line(f"{stage}: from {source}{again}")
            return state
        if state is not None:
            self.identity.require_same(stage, self.checkpoints(stage), state.numbers["made_from"])
            self.print_line(f"{stage}: continuing after step {state.step} (checkpoint verified)")
        return state

    def stop_if_asked(self, where: str) -> None:
        """Between two stages: stop if a signal came; from now on the next signal stops at once.

        Raises:
            Stopped: on every rank, if a signal came on any.
        """
        number = int(self.world.all_reduce_max([self.stops.requested])[0])
        if number:
            raise Stopped(number, where)
        self.stops.deferring = False

    def metric_log(
        self, stage: str, num_steps: int, start: int, thresholds: Mapping[str, float] | None = None
    ) -> MetricLog | MutedLog:
        """The log of the stage's metrics; `start` steps are done. See MetricLog for thresholds."""
        self.require_there()
        if not self.world.is_first or not self.writes:
            return MutedLog()
        return MetricLog(
            self.path,
            stage,
            num_steps,
            tensorboard=self.config.log.tensorboard,
            wandb=self.config.log.wandb,
            start_step=start,
            thresholds=thresholds,
            record_bytes=self.config.log.record_bytes,
        )

    def policy_source(self, stage: str = "") -> str:
        """The policy that a stage starts from: that of the first finished stage in its record's
        `after`, else `actor_model`.

        Args:
            stage: its name; empty: any stage that starts from another.
        Raises:
            ConfigError: there is neither.
        """
        if trained := self.trained("policy", stage):
            return trained
        if not self.config.actor_model:
            none = " or ".join(source.name for source in sources("policy", stage))
            raise ConfigError(
                f"--actor-model must name a model, for {self.path} has no finished {none} stage; "
                "got nothing. Give a folder or a hub name."
            )
        return self.config.actor_model

    def reward_source(self, stage: str = "") -> str | None:
        """The reward model for a stage (empty: any): that of a finished stage before it, else
        `reward_model`, else None."""
        return self.trained("reward model", stage) or self.config.reward_model or None

    def trained(self, what: Leaves, stage: str = "") -> str | None:
        """The folder of the policy or reward model that a finished stage of this run has left for
        `stage` (empty: for any); None if no such stage is finished.

        Raises:
            CheckpointError: a stage was finished with other knobs, or its folder is damaged.
        """
        for source in sources(what, stage):
            if self.is_finished(source.name):
                return str(self.path / source.model_folder)
        return None

    def checkpoint(self, stage: str, step: int) -> Path:
        """Where the checkpoint after a step is, once it is written."""
        return self.checkpoints(stage) / f"step-{step:06d}"

    def checkpoints(self, stage: str) -> Path:
        """The folder of an unfinished stage's checkpoints."""
        return self.path / CHECKPOINTS / stage
