# `make demo` and `make test` work on a fresh machine that has Python 3.10 or newer: they make .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PACKAGE_INSTALLED := .venv/.package-installed
BENCH := .venv-bench/bin
BENCH_INSTALLED := .venv-bench/.installed
BENCH_OPTIONS ?= --quick
# Two at a time, each with whole files; many tests wait. `make test WORKERS=` runs one after the other.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
PIP := python -m pip --disable-pip-version-check install --quiet --prefer-binary -c constraints.txt

.PHONY: help demo test quick lint check bench soak clean

help:
	@echo "make demo     a small model learns on two CPU processes"
	@echo "make test     ruff, mypy, and every test"
	@echo "make quick    the tests that start no processes"
	@echo "make check    ruff, mypy, and the shape of the tree"
	@echo "make bench    measure against plain torch and accelerate, side by side"
	@echo "make soak     random faults, many rounds: restarts, kills, and ten minutes on busy cores without a false alarm"

demo: $(PACKAGE_INSTALLED)
	$(BIN)/slipstream launch --cpu --num_processes 2 examples/demo.py

test: lint
	$(BIN)/python -m pytest $(WORKERS) --durations=15 --durations-min=2

quick: $(INSTALLED)
	$(BIN)/python -m pytest -m "not ranks and not launched and not netns and not browser"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q tests/test_shape.py

bench: $(BENCH_INSTALLED)
	$(BENCH)/python benchmarks/run.py $(BENCH_OPTIONS)

soak: $(INSTALLED)
	$(BIN)/python -m pytest --soak -m soak --timeout=3600 --deselect tests/faults/test_kills.py
	$(BIN)/python tests/faults/kills.py --kills 1000
	$(BIN)/python benchmarks/soak_restarts.py 50
	$(BIN)/python benchmarks/kills.py --kills 50
	$(BIN)/python benchmarks/false_alarms.py --minutes 10

# The stamps are touched last, so an interrupted installation is repeated.
$(PACKAGE_INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Slipstream needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 demo"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/$(PIP) -e .
	@touch $@

$(INSTALLED): $(PACKAGE_INSTALLED)
	$(BIN)/$(PIP) -e '.[dev]'
	@touch $@

$(BENCH_INSTALLED): pyproject.toml constraints.txt
	test -x $(BENCH)/python || $(PYTHON) -m venv .venv-bench
	$(BENCH)/$(PIP) -e '.[bench]'
	@touch $@

clean:
	rm -rf .venv .venv-bench .pytest_cache .mypy_cache .ruff_cache .hypothesis build
