# `make speed` and `make test` work on a fresh machine: each installs what it needs into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
ARGS ?=
CASES ?=
REV ?= main
BASELINE ?=
CHECK_OUT ?= runs/check-gpu

.PHONY: speed test test-full tests test-gpu check-gpu lint types workflows clean

# Tests and suites start hundreds of processes. With no bytecode kept, each would compile all that it imports, which takes
# as long as the import itself. So bytecode is kept, and pip need not compile what is never imported (40 s).
export PYTHONDONTWRITEBYTECODE :=

# PyPI's torch for Linux includes CUDA and Triton; with a CPU build of torch, pip installs Triton separately.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glabench needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

speed: $(VENV)/.installed
	$(BIN)/glabench speed $(ARGS)

# Types are checked while the tests run; each is a target of its own, too.
test: $(VENV)/.installed lint
	$(MAKE) --jobs=2 types tests

# All test cases. `make test` runs a selection that covers the same code.
test-full: $(VENV)/.installed lint
	$(MAKE) --jobs=2 types tests CASES=--full

tests: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto $(CASES) $(ARGS)

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# Checks the working tree against the revision REV, measured in turns, or against a file: make check-gpu BASELINE=FILE.
# The kernels' tests run first, because a wrong kernel may well be faster. ARGS go to `glabench check`. Every check writes
# its runs to a new folder. Reports of an earlier check are removed, so that they cannot be taken for this one's.
check-gpu: $(VENV)/.installed
	mkdir -p $(CHECK_OUT)
	rm -f $(CHECK_OUT)/tests.xml $(CHECK_OUT)/check.md $(CHECK_OUT)/check.json $(CHECK_OUT)/check.xml
	$(MAKE) test-gpu ARGS=--junitxml=$(CHECK_OUT)/tests.xml
	$(BIN)/glabench check $(if $(BASELINE),--baseline $(BASELINE),--rev $(REV)) \
		--out $(CHECK_OUT)/$$(date +%Y%m%d-%H%M%S) --markdown $(CHECK_OUT)/check.md --json $(CHECK_OUT)/check.json --junit $(CHECK_OUT)/check.xml $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

# actionlint is not a Python package, so it is optional here; CI runs it in a container.
workflows:
	@if command -v actionlint > /dev/null; then actionlint; else echo "actionlint is not installed: workflows not checked"; fi

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
