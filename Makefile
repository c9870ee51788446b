# Two commands for a fresh machine: `make speed` and `make test`. Each does its own set-up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
ARGS ?=
REV ?= main
BASELINE ?=
CHECK_OUT ?= runs/check-gpu

.PHONY: speed test test-full test-gpu check-gpu lint types workflows clean

# On a machine with an NVIDIA GPU torch comes with CUDA; a CPU build brings no Triton of its own.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glabench needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

speed: $(VENV)/.installed
	$(BIN)/glabench speed $(ARGS)

test: $(VENV)/.installed lint types
	$(BIN)/python -m pytest -n auto $(ARGS)

# Every case there is, where `test` takes those that cover what the others do.
test-full: $(VENV)/.installed lint types
	$(BIN)/python -m pytest -n auto --full $(ARGS)

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# Against the revision REV, measured in turns with it; or against a file: make check-gpu BASELINE=FILE. Correctness first:
# what computes something else may well be faster. ARGS are those of `glabench check`. Its runs go to a new folder each
# time; reports of an earlier check go, so that none can pass for this one's.
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

# actionlint is no Python package, and stays optional here; CI has it in a container.
workflows:
	@if command -v actionlint > /dev/null; then actionlint; else echo "actionlint is not installed: workflows not checked"; fi

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
