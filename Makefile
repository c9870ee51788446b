# Two commands for a fresh machine: `make speed` and `make test`. Each does its own set-up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
ARGS ?=

.PHONY: speed test test-gpu lint types clean

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
	$(BIN)/python -m pytest $(ARGS)

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
