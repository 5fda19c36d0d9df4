# make demo   install into .venv and measure the bundled digits model
# make test   install into .venv and run lint, types and tests
# make bench  the accuracy of the searches, and seconds against the peers, in an environment of its own (40 minutes)
# make faults  do to runs what happens to them, and print what was lost (two minutes)
# make runs   what storing, memory and Ray cost, and the plan against measurement (20 minutes)
# make scaling  the studies of scaling and training with three seeds (one to two hours; it can be interrupted)
# make routing  tables 6 and 7, and the seconds of routed models and of teaching (40 minutes)
# make audit  known vulnerabilities of the dependencies, where the data base can be reached
# make test-timm   the timm models, in an environment of their own

PYTHON ?= python3
BIN := .venv/bin
TIMM := .venv-timm/bin
BENCH := .venv-bench/bin
PIP := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types tests test-timm bench faults runs scaling routing audit clean
.DEFAULT_GOAL := demo

# torch goes first and alone: the version in constraints.txt, not what another package would ask for.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) torch
	$(BIN)/python $(PIP) --editable ".[dev]"
	touch $@

.venv-timm/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-timm
	$(TIMM)/python $(PIP) torch
	$(TIMM)/python $(PIP) torchvision timm pytest --editable .
	touch $@

.venv-bench/.ready: pyproject.toml constraints.txt benchmarks/constraints.txt
	$(PYTHON) -m venv .venv-bench
	$(BENCH)/python $(PIP) torch
	$(BENCH)/python $(PIP) --constraint benchmarks/constraints.txt nnsight transformer-lens pyvene captum --editable .
	touch $@

demo: .venv/.ready
	$(BIN)/understudy demo

test: lint types tests

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/mypy

# One thread a worker: small models gain nothing from more, and two workers would fight for two cores.
tests: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --durations 10

test-timm: .venv-timm/.ready
	OMP_NUM_THREADS=1 $(TIMM)/python -m pytest tests/timm_models

bench: .venv-bench/.ready
	$(BENCH)/python -m benchmarks

faults: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults.py

runs: .venv/.ready
	$(BIN)/python -m benchmarks.runs

scaling: .venv/.ready
	for study in table3 table4 table5 figure2; do $(BIN)/understudy reproduce $$study --seeds 3 || exit; done

routing: .venv/.ready
	$(BIN)/understudy reproduce table6
	$(BIN)/understudy reproduce table7
	$(BIN)/python -m benchmarks.routed --keep 3 --keep 6
	$(BIN)/python -m benchmarks.teaching

.venv-audit/.ready:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	touch $@

audit: .venv-audit/.ready
	.ci/audit .venv-audit/bin/pip-audit

clean:
	rm -rf .venv .venv-timm .venv-bench .venv-audit understudy-demo
