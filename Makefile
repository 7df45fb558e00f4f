# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 2

.PHONY: packages operations demo test test-gpu test-simulated-gpu test-slow battery lint types docs bench bench-gpu clean

demo: $(STAMP)  ## all three steps on the built-in data set, then a chat sample and a report
	$(BIN)/tandem demo

# Types are checked, by one process that takes a minute, beside the tests; what was found comes last.
# Some tests wait, for a deadline or another process, so three share two cores. What they start need
# not be compiled again.
test: $(STAMP) lint  ## lint, type-check, test
	@$(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
		PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n 3 --dist worksteal; tests=$$?; \
		wait $$types; types=$$?; cat $(VENV)/types.txt; test $$tests$$types = 00

test-gpu:  ## what only a GPU shows, in minutes; with the python and torch that are there (PYTHON=)
	TANDEM_TEST_GPU=on $(PYTHON) -m pytest tests/gpu tests/ops

test-simulated-gpu: $(STAMP)  ## the same on a GPU that is simulated, without kernels
	TANDEM_TEST_GPU=on TANDEM_GPU_KERNELS=off OMP_NUM_THREADS=1 \
		$(BIN)/python -m tests.simulated_gpu -m pytest tests/gpu

test-slow: $(STAMP)  ## the longer batteries, and the cases that `test` leaves out (tests/slow_cases.py)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

battery: $(STAMP)  ## kills, faults, damage and hostile input at full size, hours; then one table
	rm -f battery.jsonl
	TANDEM_BATTERY=battery.jsonl OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/battery -n 2 \
		-m "slow or not slow"; code=$$?; \
		$(BIN)/python -m tests.battery.table battery.jsonl && exit $$code

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)  ## write docs/config.md, docs/metrics.md and docs/api.md from the code
	$(BIN)/python -m tandem.config.reference > docs/config.md
	$(BIN)/python -m tandem.metrics.reference > docs/metrics.md
	$(BIN)/python -m tandem.api_reference > docs/.api.md && mv docs/.api.md docs/api.md

bench: $(STAMP)
	$(BIN)/python bench/step3.py
	$(BIN)/python bench/generation.py
	$(BIN)/python bench/packed.py

bench-gpu: $(STAMP)  ## all of it on a GPU; without one, try it by bench/gpu.py --tiny --device cpu
	$(BIN)/python bench/gpu.py --json bench-gpu.json
	$(BIN)/python bench/gpu_tables.py bench-gpu.json

# torch comes first and alone, at its pinned version: pip must not pick another build of it. All
# that the C++ operations need is there then: they are built while the rest is fetched.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): minutes of downloads and of building the C++ operations"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(MAKE) --no-print-directory -j 2 packages operations
	touch $(STAMP)

packages:
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"

# What goes wrong here is told where they are used.
operations:
	-@$(BIN)/python -W ignore -c "from tandem.ops import native; native.available()" 2> /dev/null

clean:
	rm -rf $(VENV) runs
