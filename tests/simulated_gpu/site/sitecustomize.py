"""Python reads this file when it starts, if its folder is in PYTHONPATH: the processes that a run
starts have the simulated GPU too."""

import os

if library := os.environ.get("TANDEM_SIMULATED_GPU"):
    from tests.simulated_gpu.load import load

    load(library)
