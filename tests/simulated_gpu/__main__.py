"""`python -m tests.simulated_gpu ARGS`: what `python ARGS` does, with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(args: list[str]) -> None:
    build = [sys.executable, "-m", "tests.simulated_gpu.build"]
    built = subprocess.run(build, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit(built.returncode)
    paths = [str(Path(__file__).with_name("site")), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TANDEM_SIMULATED_GPU": built.stdout.strip(),
        "TORCHDYNAMO_DISABLE": "1",  # no compiler makes anything for this device
    }
    os.execve(sys.executable, [sys.executable, *args], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
