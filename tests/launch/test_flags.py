"""The launcher's own flags."""

from __future__ import annotations

import pytest

from tandem.cli import main
from tandem.config.flags import parse_run_flags
from tandem.errors import ConfigError
from tandem.launch.flags import LaunchOptions, launch_help, take_launch_flags


def test_launch_flags_are_taken_off_and_the_rest_is_left_as_it_was() -> None:
    argv = "--seed 3 --num_gpus=8 --data a b --num-nodes 4 --rdzv n0:29500 --max-restarts 2"
    options, rest, problems = take_launch_flags([*argv.split(), "--local-addr", "10.0.0.2"])
    assert rest == ["--seed", "3", "--data", "a", "b"]
    assert not problems
    assert options == LaunchOptions(
        num_gpus=8, num_nodes=4, rdzv=("n0", 29500), local_addr="10.0.0.2", max_restarts=2
    )
    assert options.is_needed
    assert take_launch_flags(["--seed", "3"]) == (LaunchOptions(), ["--seed", "3"], [])
    assert not LaunchOptions(num_gpus=1).is_needed
    assert take_launch_flags(["--num-nodes", "2", "--rdzv", "[::1]:5"])[0].rdzv == ("::1", 5)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("--num-gpus", "--num-gpus must have a value; got none"),
        ("--num-gpus --seed 3", "--num-gpus must have a value; got none"),
        ("--num-gpus 0", "--num-gpus must be a whole number >= 1; got 0"),
        ("--num-gpus two", "--num-gpus must be a whole number >= 1; got two"),
        ("--max-restarts -1", "--max-restarts must be a whole number >= 0; got -1"),
        ("--num-gpus 2 --num_gpus=2", "--num-gpus must be given once; got it twice"),
        ("--num-gpu 2", "--num-gpu is not a flag. Did you mean --num-gpus?"),
        ("--num_node=2", "--num-node is not a flag. Did you mean --num-nodes?"),
        ("--gpus 2", "--gpus is not a flag. Did you mean --num-gpus?"),
        ("--num-nodes 2", "--num-nodes 2 must have a place to meet; got none"),
        ("--num-nodes 2 --rdzv node0", "--rdzv must be HOST:PORT; got node0"),
        ("--num-nodes 2 --rdzv node0:99999", "--rdzv must be HOST:PORT; got node0:99999"),
        ("--rdzv node0:1", "--rdzv must go with --num-nodes; got it alone"),
        ("--local-addr 10.0.0.2", "--local-addr must go with --num-nodes; got it alone"),
    ],
)
def test_launch_flags_that_cannot_be_are_one_line(argv: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_flags([], "train", wrong=take_launch_flags(argv.split())[2])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_launch_flag_hides_no_wrong_knob(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train --num-gpus two --bogus 1 --seed x".split()) == 2
    said = capsys.readouterr().err
    assert "--num-gpus must be a whole number >= 1; got two; --bogus is not a flag" in said
    assert "seed must be a whole number; got 'x'" in said


def test_help_names_every_flag() -> None:
    for name in LaunchOptions.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in launch_help()
