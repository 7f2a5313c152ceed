# `make demo` and `make test` work on a fresh machine that has Python 3.10 or newer: they make .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PACKAGE_INSTALLED := .venv/.package-installed
BENCH := .venv-bench/bin
BENCH_INSTALLED := .venv-bench/.installed
BENCH_OPTIONS ?= --quick
SOAK_OPTIONS ?=
DROPIN_INSTALLED := .venv/.dropin-installed
# One environment for each pair of versions. REPLACE names packages that go in the place of what the extras bring.
TORCH ?= 2.13.0
RESOLUTION ?= highest
REPLACE ?=
VERSIONS := .venv-versions/$(notdir $(PYTHON))-torch$(TORCH)-$(RESOLUTION)
ECOSYSTEM := .venv-ecosystem/bin
ECOSYSTEM_INSTALLED := .venv-ecosystem/.installed
# Two at a time, each with whole files; many tests wait. `make test WORKERS=` runs one after the other.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
DROPIN_WORKERS ?= -n 2 --dist loadfile
PIP := python -m pip --disable-pip-version-check install --quiet --prefer-binary -c constraints.txt

.PHONY: help demo test test-dropin test-ecosystem test-versions dropin standin mutations quick lint check bench soak clean

help:
	@echo "make demo     a small model learns on two CPU processes"
	@echo "make test     ruff, mypy, and every test, also those of the drop-in (compat/)"
	@echo "make test-dropin     only the tests of the drop-in"
	@echo "make test-ecosystem  transformers, peft, trl, diffusers, lm-eval and Lightning on the drop-in, in an environment of their own (.venv-ecosystem)"
	@echo "make test-versions PYTHON=python3.10 TORCH=2.8.0   every test on another Python and torch, in an environment of their own (.venv-versions);"
	@echo "              RESOLUTION=lowest-direct takes the oldest packages that are declared, REPLACE='torchao==0.13.0' others instead (docs/testing.md)"
	@echo "make standin  build the stand-in accelerator, on which accelerator code is tested (make test does it too)"
	@echo "make mutations  plant thirty mistakes with accelerators, one at a time, and list which tests notice them (an hour)"
	@echo "make test-standin  every test of several processes, on the stand-in accelerator instead of the CPU"
	@echo "make quick    the tests that start no processes"
	@echo "make check    ruff, mypy, and the shape of the tree"
	@echo "make bench    measure against plain torch and accelerate, side by side, and say what became slower since the baseline"
	@echo "make soak     random faults for hours: restarts, kills, ten minutes on busy cores, and two hours of training that must end bit-equal"
	@echo "              (as root also with full disks and cut networks; SOAK_OPTIONS='--only training --hours 1' runs a part)"

demo: $(PACKAGE_INSTALLED)
	$(BIN)/slipstream launch --cpu --num_processes 2 examples/demo.py

test: lint standin
	$(BIN)/python -m pytest $(WORKERS) --durations=15 --durations-min=2
	$(MAKE) test-dropin

# The stand-in accelerator is built once for each torch, in the user's cache folder. Where it cannot be, tests on it are skipped, and fail in CI.
standin: $(INSTALLED)
	@$(BIN)/slipstream launch --device standin --num_processes 1 --no_python true || echo "the tests on the stand-in accelerator are skipped (in CI they fail)"

mutations: standin
	$(BIN)/python tests/faults/device_mutations.py

test-standin: standin
	$(BIN)/python -m pytest $(WORKERS) --device standin -m ranks

# The drop-in goes to a folder that only its own tests have on their path: the development environment has no `accelerate`.
dropin: $(DROPIN_INSTALLED)

test-dropin: $(DROPIN_INSTALLED)
	$(BIN)/python -m pytest compat/tests --ignore=compat/tests/ecosystem $(DROPIN_WORKERS) --durations=10 --durations-min=2

test-ecosystem: $(ECOSYSTEM_INSTALLED)
	REAL_ACCELERATE=$(CURDIR)/.venv-ecosystem/original $(ECOSYSTEM)/python -m pytest compat/tests/ecosystem --timeout=600 --durations=20 --durations-min=5

# Without constraints.txt, whose versions are those of the development environment.
test-versions:
	test -x $(VERSIONS)/bin/python || $(PYTHON) -m venv $(VERSIONS)
	$(VERSIONS)/bin/python -m pip --disable-pip-version-check install --quiet uv
	$(VERSIONS)/bin/uv pip install --python $(VERSIONS)/bin/python --resolution $(RESOLUTION) 'torch==$(TORCH)' -e '.[dev]'
	test -z '$(REPLACE)' || $(VERSIONS)/bin/uv pip install --python $(VERSIONS)/bin/python $(REPLACE)
	PATH=$(CURDIR)/$(VERSIONS)/bin:$$PATH $(VERSIONS)/bin/python -m pytest $(WORKERS) --timeout=300

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
	$(BIN)/python benchmarks/soak.py $(SOAK_OPTIONS)

# The stamps are touched last, so an interrupted installation is repeated.
$(PACKAGE_INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Slipstream needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 demo"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/$(PIP) -e .
	@touch $@

$(INSTALLED): $(PACKAGE_INSTALLED)
	$(BIN)/$(PIP) -e '.[dev]'
	@touch $@

# The sources in compat/src come first on the path of the tests; this installation gives them the metadata and the command.
$(DROPIN_INSTALLED): $(INSTALLED) compat/pyproject.toml
	rm -rf .venv/dropin
	$(BIN)/$(PIP) --no-deps --target .venv/dropin ./compat
	@rm -rf compat/build
	@touch $@

# The drop-in is installed before its clients, so that pip finds the `accelerate` that they require. The original goes to a folder that only
# the programs that are compared with it have on their path.
$(ECOSYSTEM_INSTALLED): pyproject.toml constraints.txt compat/pyproject.toml compat/tests/ecosystem/requirements.txt
	test -x $(ECOSYSTEM)/python || $(PYTHON) -m venv .venv-ecosystem
	$(ECOSYSTEM)/$(PIP) -e . -e ./compat
	$(ECOSYSTEM)/$(PIP) -r compat/tests/ecosystem/requirements.txt
	rm -rf .venv-ecosystem/original
	$(ECOSYSTEM)/$(PIP) --no-deps --target .venv-ecosystem/original accelerate==1.15.0
	@touch $@

$(BENCH_INSTALLED): pyproject.toml constraints.txt
	test -x $(BENCH)/python || $(PYTHON) -m venv .venv-bench
	$(BENCH)/$(PIP) -e '.[bench]'
	@touch $@

clean:
	rm -rf .venv .venv-bench .venv-ecosystem .venv-versions .pytest_cache .mypy_cache .ruff_cache .hypothesis build
