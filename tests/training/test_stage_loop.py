"""Stopping, saving on demand, leaving bad steps out, and what is written down of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tandem.cli import main
from tandem.config.guards import GuardConfig
from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tandem.engine import learner
from tandem.errors import CheckpointError, NumericsError, Stopped
from tandem.metrics.console import StageConsole
from tandem.parallel.world import World
from tandem.training import experience as experiences
from tandem.training.flight_recorder import RECORDER_FILE
from tandem.training.own_folder import SAVE_NOW
from tandem.training.run_report import report_at_a_stop
from tandem.training.signals import StopSignals
from tandem.training.stage_loop import BAD_STEPS, StepLoop
from tandem.training.supervised import SupervisedTrainer
from tests.ranks import on_ranks
from tests.rewards.test_remote import Reply, serving
from tests.tiny import tiny_config
from tests.training.runs import ran, records


def config_of(folder: Path, model: str, data: str, **changes: Any) -> RunConfig:
    return replace(tiny_config(folder, model, data), save_every=2, **changes)


def quietly(config: RunConfig, world: World | None = None) -> list[str]:
    lines: list[str] = []
    ran(config, world, lines)
    return lines


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for part in ("sft", "reward", "ppo/actor", "ppo/critic"):
        if (folder / part).is_dir():
            for name, tensor in load_file(folder / part / "model.safetensors").items():
                found[f"{part}/{name}"] = tensor
    return found


def assert_same_weights(ours: Path, theirs: Path) -> None:
    left, right = weights(ours), weights(theirs)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(left[name], tensor), name


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    quietly(config_of(folder, tiny_model, preferences))
    return folder


def begun(whole_run: Path, folder: Path, stage: str) -> None:
    """Make a folder that of a run which has come to a stage: what comes before is done."""
    shutil.copytree(whole_run, folder, dirs_exist_ok=True)
    (folder / "evaluation.json").unlink()
    order = ["sft", "reward", "ppo"]
    for later in order[order.index(stage) :]:
        shutil.rmtree(folder / later)


def test_signals_save_the_running_step_and_the_same_command_continues(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    whole_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run, stopped in each of its stages."""
    config = config_of(tmp_path, tiny_model, preferences)
    begin = StepLoop.begin
    lines: list[str] = []
    for stage, at, number in (
        ("sft", 1, signal.SIGTERM), ("reward", 3, signal.SIGINT), ("ppo", 2, signal.SIGTERM),
    ):  # fmt: skip
        before = signal.getsignal(number)

        def interrupted(
            self: StepLoop, step: int, rows: Any, here: Any = (stage, at), number: int = number
        ) -> None:
            begin(self, step, rows)
            if (self.stage, step) == here:
                os.kill(os.getpid(), number)

        with monkeypatch.context() as patched:
            patched.setattr(StepLoop, "begin", interrupted)
            with pytest.raises(Stopped, match=f"{number.name} after {stage} step {at}") as stopped:
                ran(config, lines=lines)
        assert stopped.value.exit_code == 128 + number
        assert signal.getsignal(number) == before
        saved = (tmp_path / "checkpoints" / stage).is_dir()
        assert saved or list(tmp_path.rglob(f"step-{at:06d}"))
        assert f"report: {tmp_path}/report.html" in lines
        page = tmp_path / "report.html"
        assert stage in page.read_text("utf-8")
        page.unlink()
    lines += quietly(config)
    for stage, at in (("sft", 1), ("reward", 3), ("ppo", 2)):
        assert f"{stage}: continuing after step {at} (checkpoint verified)" in lines
    assert_same_weights(tmp_path, whole_run)
    steps = [(r["stage"], r["step"]) for r in records(tmp_path)]
    assert steps == [(r["stage"], r["step"]) for r in records(whole_run)]


def lengths(asked: dict[str, Any]) -> Reply:
    rewards = [len(turns[-1]["content"]) % 7 for turns in asked["messages"]]
    return 200, json.dumps({"rewards": rewards}).encode(), {}


def asks_for_a_stop(asked: dict[str, Any]) -> Reply:
    os.kill(os.getpid(), signal.SIGINT)
    return 503, b"", {"Retry-After": "1000"}


def served(url: str, config: RunConfig) -> RunConfig:
    function = f"tandem:remote?url={url}&retry_seconds=2000"
    ppo = replace(config.ppo, reward_function=(function,), reward_model_weight=0.0)
    scoring = replace(config.scoring, self_test=False)
    return replace(config, ppo=ppo, scoring=scoring, save_every=1)


def test_a_signal_while_a_reward_server_is_waited_for_leaves_the_step_undone(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    config = replace(config_of(tmp_path / "run", tiny_model, preferences), stages=("ppo",))
    # Evaluation, step 1, and step 2, which the signal comes in.
    with serving(lengths, lengths, asks_for_a_stop, lengths) as server:
        config = served(server.url, config)
        with pytest.raises(Stopped, match=r"SIGINT while .* waited for its server") as stopped:
            quietly(config)
        assert stopped.value.exit_code == 130
        assert (tmp_path / "run/report.html").is_file()
        lines = quietly(config)
        assert "ppo: continuing after step 1 (checkpoint verified)" in lines
        whole = replace(config, output_dir=str(tmp_path / "whole"))
        quietly(whole)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert weights(tmp_path / "run")
    steps = [(r["stage"], r["step"]) for r in records(tmp_path / "run")]
    assert steps == [(r["stage"], r["step"]) for r in records(tmp_path / "whole")]


def test_a_signal_is_heeded_in_the_middle_of_anything(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not taken for a mistake of the library or the user's code that it comes in."""

    def interrupted(*args: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)

    config = config_of(tmp_path / "run", tiny_model, preferences)
    with monkeypatch.context() as patched:
        patched.setattr(AutoConfig, "from_pretrained", interrupted)
        with pytest.raises(Stopped, match="SIGTERM before a step was running"):
            quietly(config)
    script = tmp_path / "rewards.py"
    script.write_text(
        "import os, signal\ndef reward(prompts, completions, **columns):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    return [0.0] * len(prompts)\n"
        "reward.in_process = True\n"
    )
    ppo = replace(config.ppo, reward_function=f"{script}:reward")
    with pytest.raises(Stopped, match="SIGTERM before a step was running"):
        quietly(replace(config, stages=("ppo",), ppo=ppo))


def test_a_signal_whose_exception_got_lost_stops_the_run_after_its_step() -> None:
    with StopSignals(lambda line: None) as stops:
        with suppress(Stopped):  # as within a destructor
            os.kill(os.getpid(), signal.SIGTERM)
        assert stops.requested == signal.SIGTERM


def test_what_is_printed_to_nobody_is_no_error() -> None:
    program = (
        "import sys\nfrom tandem.training.signals import outlive_readers\n"
        "outlive_readers()\nsys.stdin.read()\n"
        "for _ in range(3):\n    print('x' * 9000, flush=True)\n"
        "print('done', file=sys.stderr)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        assert process.communicate("")[1] == "done\n"
    assert process.returncode == 0


def test_two_signals_at_once_end_the_process_without_a_traceback() -> None:
    program = (
        "import os, signal\nfrom tandem.training.signals import StopSignals\n"
        "both = signal.SIGINT, signal.SIGUSR1\n"
        "with StopSignals(print):\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, both)\n"
        "    for number in both:\n"
        "        os.kill(os.getpid(), number)\n"
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGUSR1
    assert "SIGUSR1 again: stopped at once. What was saved before is kept." in ended.stdout
    assert not ended.stderr


def test_a_signal_that_a_rank_gets_from_its_launcher_too_is_one_signal() -> None:
    program = (
        "import os, signal\nfrom tandem.training.signals import StopSignals\n"
        "with StopSignals(print) as stops:\n"
        "    stops.deferring = True\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"  # from systemd, which signals every process
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('saved', stops.requested)\n"
    )
    environment = {**os.environ, "TANDEM_LAUNCHER": str(os.getpid())}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0
    assert ended.stdout.count("the run stops after this step, saved.") == 1
    assert f"saved {int(signal.SIGTERM)}" in ended.stdout


def stopped_on_one_rank(world: World, config: RunConfig) -> str:
    if world.rank == 1:
        begin = StepLoop.begin

        def interrupted(self: StepLoop, step: int, rows: Any) -> None:
            begin(self, step, rows)
            if (self.stage, step) == ("ppo", 1):
                os.kill(os.getpid(), signal.SIGTERM)

        StepLoop.begin = interrupted  # type: ignore[method-assign]
    try:
        ran(config, world)
    except Stopped as stopped:
        return str(stopped)
    return ""


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    tmp_path: Path, tiny_model: str, preferences: str, whole_run: Path
) -> None:
    begun(whole_run, tmp_path, "ppo")
    config = config_of(tmp_path, tiny_model, preferences)
    said = on_ranks(2, stopped_on_one_rank, config)
    assert said == ["stopped by SIGTERM after ppo step 1, which is saved"] * 2
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("error", [Stopped(signal.SIGINT, "after a step"), ValueError("boom")])
@pytest.mark.parametrize("is_full", [False, True])
def test_whatever_stops_a_run_leaves_a_report_or_the_command_for_it(
    monkeypatch: pytest.MonkeyPatch, size: int, error: BaseException, is_full: bool
) -> None:
    """A report that cannot be written hides nothing; a rank that failed is not waited for."""

    def write(path: Path) -> Path:
        if is_full:
            raise OSError(5, "Bad disk")
        return path / "report.html"

    monkeypatch.setattr("tandem.training.run_report.write_report", write)
    lines: list[str] = []
    world = SimpleNamespace(size=size, is_first=True)
    run: Any = SimpleNamespace(path=Path("a b"), world=world, print_line=lines.append, writes=True)
    with pytest.raises(type(error)), report_at_a_stop(run):
        raise error
    if size == 2 and isinstance(error, ValueError):
        assert lines == ["report: tandem report 'a b' writes it"]
    elif is_full:
        assert lines == [
            "report: not written: OSError: [Errno 5] Bad disk. tandem report 'a b' writes it"
        ]
    else:
        assert lines == ["report: a b/report.html"]


def started(config: RunConfig, folder: Path, *python: str) -> subprocess.Popen[str]:
    """A run in a process of its own, as a user starts it; `python`'s options."""
    path = folder / "given.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, *python, "-m", "tandem", "train", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


class Forked:
    """`tandem.cli.main` in a fork of this process, which need not import anything; what it says."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        path = folder / "given.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        reads, writes = os.pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._run, args=(path, writes))
        self.process.start()
        os.close(writes)
        self.stdout = os.fdopen(reads, encoding="utf-8")

    @staticmethod
    def _run(path: Path, writes: int) -> None:
        sys.stdout = sys.stderr = os.fdopen(writes, "w", buffering=1, encoding="utf-8")
        sys.exit(main(["train", "--config", str(path)]))

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self) -> str:
        """What it said until its end."""
        rest = self.stdout.read()
        self.stdout.close()
        self.process.join(timeout=240)
        return rest


def said_by(process: subprocess.Popen[str] | Forked, phrase: str, lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if phrase in line:
            return
    raise AssertionError(f"ended without saying {phrase!r}:\n{''.join(lines)}")


def test_the_command_ends_with_the_signals_code_and_one_line(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = config_of(tmp_path / "run", tiny_model, preferences)
    config = replace(config, sft=replace(config.sft, max_steps=3000, epochs=1000))
    forked, lines = Forked(config, tmp_path), list[str]()
    said_by(forked, " 2/3000 ", lines)
    forked.send_signal(signal.SIGTERM)
    rest = forked.ended()
    assert forked.process.exitcode == 128 + signal.SIGTERM
    last = rest.strip().splitlines()[-1]
    assert last.startswith("tandem: stopped by SIGTERM after sft step ")
    assert last.endswith("which is saved. The same command continues; finished stages are kept.")
    assert "Traceback" not in rest


def test_a_second_signal_ends_the_command_at_once(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path / "run", tiny_model, preferences, stages=("sft",))
    begin = StepLoop.begin

    def slow(self: StepLoop, step: int, rows: Any) -> None:
        """A step that does not end within the test."""
        begin(self, step, rows)
        if step == 3:
            print("in a long step", flush=True)
            for _ in range(600):
                time.sleep(0.1)

    with monkeypatch.context() as patched:
        patched.setattr(StepLoop, "begin", slow)
        process, lines = Forked(config, tmp_path), list[str]()
    said_by(process, "in a long step", lines)
    while not list(tmp_path.rglob("step-000002/MANIFEST.json")):  # written beside the training
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said_by(process, "A second signal stops it at once", lines)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.ended()
    assert process.process.exitcode == -signal.SIGINT
    assert time.monotonic() - start < 50  # the step itself takes 60 s
    again = quietly(config)
    assert "sft: continuing after step 2 (checkpoint verified)" in again


def test_a_file_asks_for_a_checkpoint(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, tiny_model, preferences, stages=("sft",))
    config = replace(config, save_every=0)
    begin = StepLoop.begin
    found: list[str] = []

    def asked(self: StepLoop, step: int, rows: Any) -> None:
        begin(self, step, rows)
        if (self.stage, step) == ("sft", 1):
            (tmp_path / SAVE_NOW).touch()
        if (self.stage, step) == ("sft", 2):
            found.extend(path.name for path in tmp_path.rglob("step-*"))

    monkeypatch.setattr(StepLoop, "begin", asked)
    lines = quietly(config)
    assert f"sft step 1: saved, as {SAVE_NOW} asked" in lines
    assert "step-000001" in found
    assert not (tmp_path / SAVE_NOW).exists()


def test_signals_are_left_alone_off_the_main_thread(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    config = replace(config_of(tmp_path, tiny_model, preferences), stages=("sft",))
    thread = threading.Thread(target=quietly, args=(config,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert (tmp_path / "sft" / "model.safetensors").exists()


def _nan_loss(patch: pytest.MonkeyPatch, stage: str, at: Callable[[], bool]) -> None:
    backward = learner.Learner.backward

    def poisoned(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(
            self, loss * float("nan") if self.name == stage and at() else loss, *args, **kwargs
        )

    patch.setattr(learner.Learner, "backward", poisoned)


def _inf_gradient(patch: pytest.MonkeyPatch, stage: str, at: Callable[[], bool]) -> None:
    finished = learner.Learner.finished_gradients

    def poisoned(self: Any) -> list[torch.Tensor]:
        gradients = finished(self)
        if self.name == stage and at():
            gradients[0].view(-1)[0] = float("inf")
        return gradients

    patch.setattr(learner.Learner, "finished_gradients", poisoned)


@pytest.mark.parametrize(
    ("poison", "name"),
    [
        *((_inf_gradient, name) for name in ("sft", "reward", "actor", "critic")),
        *((_nan_loss, name) for name in ("sft", "actor")),
    ],
)
def test_a_bad_update_is_left_out_written_down_and_counted(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    whole_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    poison: Callable[..., None],
    name: str,
) -> None:
    stage = name if name in ("sft", "reward") else "ppo"
    begun(whole_run, tmp_path, stage)
    stages = ("sft", "reward", "ppo")
    config = config_of(tmp_path, tiny_model, preferences, stages=stages[: stages.index(stage) + 1])
    now: list[tuple[str, int]] = [("", 0)]
    kept: list[dict[str, torch.Tensor]] = []
    begin, end = StepLoop.begin, StepLoop.end
    learners: dict[str, Any] = {}
    built = learner.Learner.__init__

    def building(self: Any, called: str, *args: Any, **kwargs: Any) -> None:
        built(self, called, *args, **kwargs)
        learners[called] = self

    def beginning(self: StepLoop, step: int, rows: Any) -> None:
        begin(self, step, rows)
        now[0] = (self.stage, step)
        if now[0] == (stage, 2):
            kept.append({n: w.clone() for n, w in learners[name].weights().items()})

    def ending(self: StepLoop, values: Any) -> None:
        if now[0] == (stage, 2):
            kept.append({n: w.clone() for n, w in learners[name].weights().items()})
        end(self, values)

    monkeypatch.setattr(learner.Learner, "__init__", building)
    monkeypatch.setattr(StepLoop, "begin", beginning)
    monkeypatch.setattr(StepLoop, "end", ending)
    poison(monkeypatch, name, lambda: now[0] == (stage, 2))
    lines = quietly(config)
    before, after = kept
    assert all(torch.equal(after[n], w) for n, w in before.items())
    found = [r["values"] for r in records(tmp_path) if r["stage"] == stage and r["step"] > 0]
    assert [v["skipped"] > 0 for v in found] == [False, True, True]
    assert all(torch.isfinite(torch.tensor(list(v.values()))).all() for v in found)
    (record, *_) = sorted((tmp_path / BAD_STEPS).iterdir())
    written = json.loads(record.read_text(encoding="utf-8"))
    assert (written["stage"], written["step"]) == (stage, 2)
    assert written["rows"]
    assert "must be finite" in written["reason"]
    assert any(f"{stage} step 2: left out" in line for line in lines)
    assert all(torch.isfinite(w).all() for w in weights(tmp_path).values())


@pytest.mark.parametrize("quantity", ["rewards", "values", "logprobs"])
def test_bad_experience_is_left_out_before_any_update(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    whole_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantity: str,
) -> None:
    begun(whole_run, tmp_path, "ppo")
    config = config_of(tmp_path, tiny_model, preferences)
    require, calls = experiences._require_finite, [0]

    def poisoned(**tensors: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 2:
            tensors[quantity] = tensors[quantity].clone()
            tensors[quantity].view(-1)[0] = float("nan")
        require(**tensors)

    monkeypatch.setattr(experiences, "_require_finite", poisoned)
    quietly(config)
    found = {r["step"]: r["values"] for r in records(tmp_path) if r["stage"] == "ppo"}
    assert [found[step]["skipped"] for step in (1, 2, 3)] == [0, 1, 1]
    assert "updates" not in found[2]
    assert "updates" in found[3]


def test_too_many_bad_steps_end_the_run_and_leave_the_recorder(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, tiny_model, preferences, guards=GuardConfig(max_skipped=1))
    _nan_loss(monkeypatch, "sft", lambda: True)
    with pytest.raises(
        NumericsError, match=r"guards.max_skipped=1 steps in a row.*got 2 at step 2"
    ):
        quietly(config)
    lines = (tmp_path / RECORDER_FILE).read_text(encoding="utf-8").splitlines()
    recorded = [json.loads(line) for line in lines]
    assert [line.get("step") for line in recorded] == [1, 2, None]
    assert recorded[0]["rows"][0]["token_ids"]
    assert "NumericsError" in recorded[-1]["ended_by"]
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not list(tmp_path.rglob("step-*"))


def bad_on_one_rank(world: World, config: RunConfig) -> list[dict[str, float]]:
    if world.rank == 1:
        calls = [0]
        backward = learner.Learner.backward

        def poisoned(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            calls[0] += 1
            backward(self, loss * float("nan") if calls[0] == 3 else loss, *args, **kwargs)

        learner.Learner.backward = poisoned  # type: ignore[method-assign]
    ran(config, world)
    return [r["values"] for r in records(Path(config.output_dir)) if r["stage"] == "sft"]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_bad_on_one_rank_is_left_out_on_all(
    tmp_path: Path, tiny_model: str, preferences: str, stage: int
) -> None:
    config = config_of(tmp_path, tiny_model, preferences)
    config = replace(
        config, stages=("sft",), parallel=replace(config.parallel, actor_zero_stage=stage)
    )
    for values in on_ranks(2, bad_on_one_rank, config):
        assert [v["skipped"] for v in values if "skipped" in v][-1] == 1
    assert torch.isfinite(
        load_file(tmp_path / "sft" / "model.safetensors")["model.norm.weight"]
    ).all()


def test_the_clock_of_the_eta_starts_at_the_first_step(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def tells(kind: type, name: str) -> None:
        whole = getattr(kind, name)

        def also(*values: Any, **named: Any) -> Any:
            told.append(name)
            return whole(*values, **named)

        monkeypatch.setattr(kind, name, also)

    tells(StepLoop, "measure_start")
    tells(SupervisedTrainer, "rehearse")
    tells(SupervisedTrainer, "step")
    tells(StageConsole, "begin")
    quietly(config_of(tmp_path / "run", tiny_model, preferences, stages=("sft",)))
    assert told[:5] == ["measure_start", "rehearse", "begin", "step", "step"]
    assert told.count("begin") == 1


def test_what_the_launcher_and_the_demo_leave_before_a_run_is_its_own(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "base").mkdir()
    config = replace(config_of(tmp_path, tiny_model, preferences), stages=("sft",))
    quietly(config)
    assert (tmp_path / "sft" / "model.safetensors").exists()


def test_a_folder_of_other_things_is_left_alone(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    (tmp_path / "thesis.tex").write_text("x", encoding="utf-8")
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError, match=r"got .* with 'notes' and 1 more\. Choose another"):
        quietly(config_of(tmp_path, tiny_model, preferences))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "thesis.tex"]


@pytest.mark.parametrize(
    "module", ["yaml", "torch.nn", "transformers", "tandem.training.run_stages"]
)
def test_a_signal_while_modules_are_imported_is_one_line(
    tmp_path: Path, tiny_model: str, preferences: str, module: str
) -> None:
    """Wherever the imports are when it comes: Python itself says when it has one."""
    config = config_of(tmp_path / "run", tiny_model, preferences)
    process = started(config, tmp_path, "-X", "importtime")
    lines: list[str] = []
    while not lines or lines[-1].rpartition("|")[2].strip() != module:
        said_by(process, module, lines)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in said
    assert re.search(r"^tandem: stopped by SIGINT before .*$", said.strip().splitlines()[-1])


class _Asked:
    """A stop that comes while this is finalized."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_stop_that_comes_in_a_finalizer_is_not_lost() -> None:
    signals = StopSignals(lambda line: None)
    asked = [_Asked()]

    def finalize_and_wait() -> None:
        with signals:
            asked.clear()  # what a finalizer raises is printed and ignored
            assert not signals.requested
            time.sleep(5)

    with pytest.raises(Stopped, match="SIGTERM before a step"):
        finalize_and_wait()
    assert signals.requested == signal.SIGTERM
