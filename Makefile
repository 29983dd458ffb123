# `make demo` trains the example, `make test` checks everything; both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0

.PHONY: demo control test lint bench-compile bench-phases invariance clean

# torch first and by itself: else pip takes a newer build with gigabytes of CUDA packages.
$(VENV)/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints/cpu.txt torch
	$(BIN)/pip install --quiet --constraint constraints/cpu.txt --editable '.[run,dev]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/msrl-compile examples/arithmetic/grpo.rlg
	$(BIN)/msrl-run examples/arithmetic/grpo.rlg --seed $(SEED)

# The same run with shuffled rewards: accuracy must not rise.
control: $(VENV)/ready
	$(BIN)/msrl-run examples/arithmetic/control.rlg --seed $(SEED)

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

bench-compile: $(VENV)/ready
	$(BIN)/python bench/compile.py

bench-phases: $(VENV)/ready
	$(BIN)/python bench/phases.py

# What no layout, dock or order changes: the same numbers but for rounding, about 10 minutes.
invariance: $(VENV)/ready
	$(BIN)/python bench/invariance.py

clean:
	rm -rf $(VENV)
