"""The command as a user meets it: help, mistakes, exit codes, the example."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tandem.cli import main
from tandem.launch.failure import disk_line
from tests.tiny import save_tiny_model


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("args", [(), ("--help",), ("train", "--help"), ("data",), ("--version",)])
def test_help_and_version(capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    assert "tandem" in out


def ended(stdout: int, *args: str) -> tuple[int, str]:
    """A command's exit code and stderr, where it prints to that descriptor."""
    command = [sys.executable, "-m", "tandem", *args]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("args", [("--help",), ("report", "run")])
def test_what_cannot_be_printed_is_said_of_standard_output(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "config.yaml").touch()
    args = tuple(str(tmp_path) if arg == "run" else arg for arg in args)
    with open("/dev/full", "wb") as full:
        code, err = ended(full.fileno(), *args)
    assert (code, err) == (2, "tandem: standard output: No space left on device\n")


def test_a_run_goes_on_where_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    """It once ended before its first step, with the exit code of a run that is done."""
    reader, writer = os.pipe()
    os.close(reader)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    model, folder = str(tmp_path / "no-model"), str(tmp_path / "run")
    flags = ["--actor-model", model, "--data", str(rows), "--output-dir", folder]
    code, err = ended(writer, "sft", *flags)
    os.close(writer)
    assert code == 2
    assert "no-model" in err


def test_a_flag_that_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "eval", "runs/x", "--prompts", "2", "--prompts=3")
    assert (code, err.count("\n")) == (2, 1)
    assert "tandem eval: --prompts must be given once; got it twice" in err


@pytest.mark.parametrize("command", ["eval", "replay --step 1", "push you/model", "chat", "serve"])
def test_a_command_says_that_it_loads_before_it_does(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    code, out, _ = run(capsys, name, "/nowhere", *flags)
    assert (code, out) == (2, f"tandem {name}: loading PyTorch and transformers ...\n")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("chat", ("model:", "sampling:", "--top-p X", "[0.95]")),
        ("eval", ("RUN", "--prompts N", "ppo.eval_prompts; all of", "--data DATA ...")),
        ("data", ("usage: tandem data check DATA ...", "--heldout X", "[0.05]")),
        ("data check", ("--stages NAME ...", "[sft reward ppo]")),
        ("report", ("usage: tandem report RUN",)),
        ("replay", ("--step N", "[required]", "--rows N", "[3]")),
        ("export", ("--output DIR", "[required]", "--step N", "[the newest checkpoint's]")),
        ("sweep", ("--sweep-stages N ...", "[0 1 2 3]", "--no-sweep-offload")),
        ("demo", ("--output-dir DIR", "[runs/demo]")),
        ("vote", ("--who NAME", "[the user's name]", "--once")),
        (
            "sample",
            ("--output FILE", "[the run's, else 128]", "--write WHAT", "--prompts-per-step"),
        ),
        ("plan", ("what:", "--hardware NAME", "[this machine]", "8xA100-80G")),
    ],
)
def test_help_of_small_commands_has_groups_defaults_and_an_example(
    capsys: pytest.CaptureFixture[str], command: str, shown: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"\nExample: tandem {command}" in out
    for part in shown:
        assert part in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", ["sft", "chat"])
def test_help_of_a_command_is_shown_by_help_before_it(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    expected = run(capsys, command, "--help")
    assert run(capsys, "help", command) == expected
    assert expected[0] == 0
    assert expected[1].startswith(f"usage: tandem {command} ")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("trian",), "'trian' is not a command. Did you mean train?"),
        (("--verison",), "'--verison' is not a command. Did you mean --version?"),
        (("--model", "x"), "Flags follow a command, as in: tandem train --model."),
        (("help", "trian"), "'trian' is not a command. Did you mean train?"),
        (("vote", "."), "got the folder .. Give the file that the run names"),
        (("--seed", "3"), "Flags follow a command, as in: tandem train --seed."),
        (("train", "--actor-modle", "x"), "Did you mean --actor-model?"),
        (("train",), "actor_model must name a model"),
        (("train", "--actor-model", "/nowhere", "--data", "x.jsonl"), "/nowhere"),
        (("chat", "x", "--temperature", "-1"), "temperature must be >= 0.0001; got -1.0"),
        (("chat", "x", "--dtype", "int4"), "--dtype must be one of auto, fp32, bf16, fp16; got"),
        (("data", "check", "x", "--heldout", "7"), "dataset.heldout must be >= 0 and < 1; got 7"),
        (("data", "check", "x", "--max-tokens", "4"), "dataset.max_tokens must be >= 8; got 4"),
        (("data", "check", "x", "--rows", "-3"), "--rows must be >= 0; got -3"),
        (("eval", "x", "--prompts", "-3"), "--prompts must be >= 0; got -3"),
        (("chat",), "the following arguments are required: PATH; for example: tandem chat runs/"),
        (
            ("serve", "--model_path", "x"),
            "tandem serve. Write PATH without one: tandem serve runs/",
        ),
        (("report", "--run", "x"), "--run is not a flag of tandem report. Write RUN without one: "),
        (("data", "check", "--file", "x"), "Write DATA without one: tandem data check "),
        (("sample", "--model", "x", "--output", "y"), "the model must come first; got --model"),
        (("chat", "/nowhere"), "/nowhere"),
        (("eval", "/nowhere"), "must be a run's folder"),
        (
            ("chat", "x", "--modl", "ppo"),
            "--modl is not a flag of tandem chat. Did you mean --model?",
        ),
        (
            ("replay", "x", "--stp", "2"),
            "--stp is not a flag of tandem replay. Did you mean --step?",
        ),
        (("doctor", "--xyz"), "--xyz is not a flag of tandem doctor. See tandem doctor --help."),
        (
            ("serve", "x", "--port", "abc"),
            "tandem serve: --port must be a whole number; got 'abc'.",
        ),
        (("chat", "x", "--top-p", "1,0"), "tandem chat: --top-p must be a number; got '1,0'."),
        (
            ("sample", "x", "--data", "p.jsonl", "--ouput", "y"),
            "--ouput is not a flag of tandem sample. Did you mean --output?",
        ),
        (("sample", "x", "--data", "p.jsonl"), "arguments are required: --output"),
        (("sweep", "x.yaml", "--sweep-dirr", "y"), "Did you mean --sweep-dir?"),
        (("sweep", "--sweep-dir", "y", "--sweep-lor", "8"), "Did you mean --sweep-lora?"),
        (("plan", "--data", "x", "--sft.batch-size", "0"), "sft.batch_size must be >= 1; got 0"),
        (("plan", "--data", "x", "--harware", "2xL4"), "--harware is not a flag of tandem plan. D"),
        (("data", "chek"), "tandem data has one command, check; got 'chek'"),
        (("data", "check", "x", "--data-split", "a"), "--data-split must be numbers"),
        (("vote", "no.jsonl", "--once"), "neither it nor no.jsonl.asked.jsonl is there"),
        (("vote", "no/votes.jsonl"), "FILE must be in a folder that is there; got no/votes.jsonl"),
        (("serve", "x", "--votes", "no/votes.jsonl"), "--votes must be a file in a folder that is"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *args)
    assert code == 2
    assert part in err
    assert err.startswith("tandem: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_inside_a_run_is_no_output_dir(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("command.txt", "config.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "hello"}\n')
    model = save_tiny_model(tmp_path / "model")
    capsys.readouterr()
    for folder in ("checkpoints", "new/deeper"):
        args = ("sft", "--actor-model", model, "--data", str(data))
        code, _, err = run(capsys, *args, "--output-dir", str(tmp_path / folder))
        assert code == 2
        assert f"must not be inside another run's folder; got {tmp_path / folder}" in err
        assert err.count("\n") == 1
    assert not list((tmp_path / "checkpoints").iterdir())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("where", ["a file", "below a file", "a broken link", "read-only"])
def test_a_folder_that_cannot_be_written_is_said_before_data_are_read(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    (tmp_path / "file").touch()
    model = save_tiny_model(tmp_path / "model")
    if where == "read-only":  # root may write everywhere but on a read-only disk
        monkeypatch.setattr("tandem.training.own_folder.os.access", lambda *_, **__: False)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    folders = {"a file": "file", "below a file": "file/run", "a broken link": "link"}
    folder = folders.get(where, "run")
    capsys.readouterr()
    args = ("sft", "--actor-model", model, "--data", str(tmp_path / "rows.jsonl"))
    code, out, err = run(capsys, *args, "--output-dir", str(tmp_path / folder))
    assert code == 2
    assert f"--output-dir must be a folder that can be written; got {tmp_path / folder} (" in err
    assert err.count("\n") == 1
    assert "reading" not in out


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "--debug")
    assert code == 2
    assert "Traceback" in err


@pytest.mark.parametrize(
    "error", [MemoryError("os error 12"), RuntimeError("can't allocate memory: 5 bytes\nat line 7")]
)
def test_no_memory_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: object) -> None:
        raise error

    monkeypatch.setattr("tandem.training.demo.demo", full)
    code, _, err = run(capsys, "demo")
    assert code == 2
    assert err.startswith("tandem: this run must fit in memory; got")
    assert err.count("\n") == 1
    monkeypatch.setattr("tandem.training.demo.demo", lambda folder: [][0])
    with pytest.raises(IndexError):
        main(["demo"])


def test_ctrl_c_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.cli._run", stop)
    code, _, err = run(capsys, "train")
    assert code == 130
    assert "The same command continues from the last checkpoint" in err


@pytest.mark.parametrize(
    ("number", "more"),
    [
        (errno.ENOSPC, " (4,096 bytes free). Free some space. The same command {kept}."),
        (errno.EACCES, ""),
    ],
)
def test_a_full_disk_is_told_with_what_is_free_and_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
    more: str,
) -> None:
    def refused(*args: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "not" / "there.json"))

    monkeypatch.setattr("tandem.plan.sweep_command.sweep_command", refused)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Mock(free=4096))
    code, _, err = run(capsys, "sweep", "x.yaml")
    assert code == 2
    line = f"tandem: {tmp_path}/not/there.json: {os.strerror(number)}"
    more = more.format(kept="continues; finished cases are kept")
    assert err == f"{line}{more}\n"


def test_a_full_disk_is_told_where_nobody_may_ask_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr("shutil.disk_usage", refused)
    error = OSError(errno.ENOSPC, "full", str(tmp_path / "x"))
    ending = "Free some space. The same command starts over."
    assert disk_line(error, ["plan"]) == f"{tmp_path}/x: full. {ending}"
    error.filename = 3  # an open file's number
    assert disk_line(error, ["plan"]) == "3: full"


@pytest.mark.parametrize(
    ("args", "home", "going_on"),
    [
        (("plan", "--config", "x"), "plan.plan_command.plan_command", "starts over"),
        (("eval", "x"), "training.comparing.eval_command.evaluate_run", "starts over"),
        (("sweep", "x.yaml"), "plan.sweep_command.sweep_command",
         "continues; finished cases are kept"),
        (("chat", "x"), "serve.chat.chat", "starts over; /save keeps a conversation"),
        (("vote", "x.jsonl"), "serve.vote_command.ask_all", "continues; votes are kept"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_says_how_it_goes_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    home: str,
    going_on: str,
    number: signal.Signals,
) -> None:
    ended: list[str] = []

    def stopped(*args: object, **more: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            ended.append("what it had started")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(f"tandem.{home}", stopped)
    code, _, err = run(capsys, *args)
    assert code == 128 + number
    by = " by SIGTERM before it was done" if number == signal.SIGTERM else ""
    assert err == f"tandem: stopped{by}. The same command {going_on}.\n"
    assert ended == ["what it had started"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_is_missing_is_said_alone_and_in_sentences(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "sft", "--output-dir", str(tmp_path / "run"))
    assert code == 2
    assert "got nothing. Give --actor-model. data must name at least one data set" in err
    assert "rows:" not in out


def test_a_second_ctrl_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.cli._run", stop)
    monkeypatch.setattr("tandem.cli.complain", stop)
    assert main(["train"]) == 130


def test_data_check_shows_what_would_be_trained_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    file = tmp_path / "prefs.jsonl"
    rows = [{"prompt": f"Question {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)) + '\n{"prompt": "x", "chosen": ""}\n')
    model = save_tiny_model(tmp_path / "model")
    code, out, _ = run(capsys, "data", "check", str(file), "--tokenizer", model)
    assert code == 1  # a row was bad
    assert "21" in out
    assert "prefs.jsonl:21" in out
    assert "longer than" not in out
    limits = ("--max-tokens", "8", "--max-prompt-tokens", "2", "--system-prompt", "Be brief.")
    _, out, _ = run(capsys, "data", "check", str(file), "--tokenizer", model, *limits)
    assert "prompt: 20 of 20 (100.0%) are longer than max_prompt_tokens 2." in out
    assert "chosen: 20 of 20 (100.0%) are longer than max_tokens 8." in out
    assert "Be brief." in out


def test_the_custom_loop_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[1] / "examples" / "custom_loop.py"
    spec = importlib.util.spec_from_file_location("custom_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_loop"] = module
    spec.loader.exec_module(module)
    rewards = module.main(save_tiny_model(tmp_path / "model"), 2, str(tmp_path / "out"))
    assert len(rewards) == 2
    assert (tmp_path / "out/ppo/actor/model.safetensors").exists()


def test_a_run_without_a_policy_names_no_chat(tmp_path: Path) -> None:
    from tandem.cli import _next_command

    assert _next_command(tmp_path).startswith(f"use it: tandem ppo --reward-model {tmp_path}/rew")
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/config.json").write_text("{}", "utf-8")
    assert _next_command(tmp_path) == f"chat:   tandem chat {tmp_path}"


_ENDING = """
import atexit, gc, sys
atexit.register(lambda: print("kept", gc.get_freeze_count(), len(gc.get_objects())))
from tandem.__main__ import main
sys.argv = ["tandem", "--version"]
"""


def _kept_and_watched(code: str) -> tuple[int, int]:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ended.stderr
    _, kept, watched = ended.stdout.splitlines()[-1].split()
    return int(kept), int(watched)


def test_a_command_ends_without_a_search_for_garbage() -> None:
    """Which takes a second once torch is loaded."""
    kept, watched = _kept_and_watched(f"{_ENDING}sys.exit(main())")
    assert kept > 1000 > watched


def test_it_searches_where_a_library_would_print_garbage_as_leaks() -> None:
    loads = """
import contextlib
with contextlib.suppress(ImportError):
    import triton
kind = type("nb_type_0", (type,), {"__module__": "nanobind"})
gc.freeze()
sys.exit(main())
"""
    kept, watched = _kept_and_watched(_ENDING + loads)
    assert kept == 0 < 1000 < watched


@pytest.mark.parametrize(
    ("given", "count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_sleep_soon(given: dict[str, str], count: str) -> None:
    code = """
import atexit, os, sys
atexit.register(lambda: print(os.environ.get("GOMP_SPINCOUNT")))
from tandem.__main__ import main
sys.argv = ["tandem", "--version"]
sys.exit(main())
"""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {k: v for k, v in os.environ.items() if k not in names} | given
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.splitlines()[-1] == count


@pytest.mark.parametrize(
    "command", ["eval frst", "report frst", "replay frst --step 1", "export frst --output so-far"]
)
def test_a_mistyped_run_is_answered_with_the_folder_beside_it(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *command.split())
    assert code == 2
    assert "it is not. Did you mean first?" in err


def test_a_command_may_be_started_with_its_standard_streams_closed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = f"""
import os, sys, types
from tandem import __main__ as command
def look():
    print("said")
    print("complained", file=sys.stderr)
    streams = (sys.stdin, sys.stdout, sys.stderr)
    seen = [sys.stdin.read(), sys.stdin.isatty(), [stream.fileno() for stream in streams]]
    open({str(told)!r}, "w").write(repr(seen))
    return 0
sys.modules["tandem.cli"] = types.SimpleNamespace(main=look)  # its imports may open files
sys.exit(command.main())
"""
    shell = 'exec "$0" -c "$1" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", shell, sys.executable, code], check=True)
    assert told.read_text() == repr(["", False, [0, 1, 2]])


def test_what_stands_for_closed_streams_is_there_for_children_too(tmp_path: Path) -> None:
    """Their own files would get those numbers; a reward function's process ended by it."""
    code = (
        "import os, sys; from tandem.__main__ import _open_closed_streams as f; f(); "
        "streams = sys.stdin, sys.stdout, sys.stderr; "
        "open(sys.argv[1], 'w').write(str([os.get_inheritable(s.fileno()) for s in streams]))"
    )
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    subprocess.run([*shell, sys.executable, "-c", code, str(tmp_path / "found")], check=True)
    assert (tmp_path / "found").read_text() == "[True, True, True]"
