# Every step that the project needs, from nothing but Python 3.11 or newer. `make demo`, `make test`, `make check`,
# `make bench`, `make docs`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: demo test check bench docs stress clean other-python

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(STAMP)  ## The main job, on an embedded simulated cloud
	$(BIN)/python -m cachedfs.demo

test: $(STAMP)  ## All tests but the stress runs
	$(BIN)/python -m pytest -m "not live and not stress" $(ARGS)

check: $(STAMP)  ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

bench: $(STAMP)  ## The benchmark tables; writes bench.json, fails on a missed number
	$(BIN)/python -m tests.benchmarks --json bench.json $(ARGS)

docs: $(STAMP)  ## Run every code block of the documentation
	$(BIN)/python -m pytest tests/test_docs.py

clean:
	rm -rf $(VENV) build dist bench.json .mypy_cache .ruff_cache .hypothesis
