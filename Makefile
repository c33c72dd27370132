# Every step that the project needs, from nothing but Python 3.11 or newer: `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
DOCS_STAMP = $(VENV)/.installed-docs
# A newer Python, which zarr 3.4 needs: on the path, or kept by pyenv.
NEWER := $(shell for each in $(OTHER_PYTHON) python3.13 $(HOME)/.pyenv/versions/3.13.*/bin/python3 python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python3; do \
	"$$each" -c 'import sys; sys.exit(sys.version_info[:2] == ('"$$($(PYTHON) -c 'import sys; print(*sys.version_info[:2], sep=",")')"'))' \
	>/dev/null 2>&1 && echo "$$each" && break; done)

# What the tests need of the package; the rest is in dependency groups, which pip 25.1 and newer know.
EXTRAS = gcs,s3,hf,drive,zarr,hdf5,pack,sim,report,mount,notebook
# Modules are compiled when they are first imported: most of these packages' never are.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# This version, before anything else asks for one: another may come with gigabytes for GPUs.
TORCH = torch==2.13.0

# The tests start some thousand processes, which would compile all of the project each time.
unexport PYTHONDONTWRITEBYTECODE

# Three files of tests at a time: two cores are busy with them, as many of them wait.
TOGETHER = -n 3 --dist loadfile
SUITE = "not live and not stress and not works"

.PHONY: help quick demo test test-newer live check bench docs site dist stress oldest works mosaic clean

help:  ## These lines
	@sed -n 's/^\([a-z-]*\):[^#]*  ## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A newcomer's first run. `make test` installs the rest into the same environment.
QUICK = common readahead filesystem cache/test_store.py cache/test_metadata.py core/test_lookups.py test_config.py test_errors.py
quick: $(BIN)/python  ## The tests of the core in a minute, without torch and other large packages
	$(INSTALL) --upgrade "pip>=25.1"
	$(INSTALL) --editable ".[gcs,drive,s3,zarr,sim,cli]" --group quick
	$(BIN)/python -m pytest -m $(SUITE) $(TOGETHER) $(QUICK:%=tests/%) $(ARGS)

$(STAMP): pyproject.toml | $(BIN)/python
	$(INSTALL) --upgrade "pip>=25.1"
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] > (3, 11))' || { echo "skipped: torch, and the tests that need it: they run on Python 3.11"; exit 0; } && \
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable ".[$(EXTRAS)]" --group dev
	@touch $@

demo: $(STAMP)  ## The main job, on an embedded simulated cloud
	$(BIN)/python -m cachedfs demo

test: $(STAMP)  ## All tests but the stress runs
	$(BIN)/python -m tests.rerun -m $(SUITE) $(TOGETHER) $(ARGS)

NEWER_SKIPS = project demo sim
test-newer:  ## The tests of the package on a newer Python, without torch: not those of pages, examples, demo and simulators
ifeq ($(NEWER),)
	@echo "skipped: there is no python3.12 or python3.13 here (OTHER_PYTHON= names one)"
else
	@$(MAKE) --no-print-directory test PYTHON=$(NEWER) VENV=$(VENV)-newer ARGS="$(NEWER_SKIPS:%=--ignore=tests/%) $(ARGS)"
endif

# What reads and writes, with the oldest releases that are accepted. Not of the tests: what their own deprecations say, and
# what their namespace packages import when Python starts; fsspec's memory and xarray's Zarr were others then.
OLDEST = $(VENV)-oldest
OLDEST_TESTS = origins cache core filesystem packing integration/test_drive.py test_config.py
oldest:  ## The same reads and writes with the oldest dependencies that pyproject.toml accepts
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/release/oldest.txt --editable ".[gcs,drive,zarr,hdf5,sim,cli]" \
		pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis pandas pyarrow psutil xarray pillow
	$(OLDEST)/bin/python -m pytest -m $(SUITE) -W default::DeprecationWarning $(TOGETHER) \
		-k "not OverDrive and not emory and not xarray and not imports" $(OLDEST_TESTS:%=tests/%) $(ARGS)

stress: $(STAMP)  ## Long runs of what the suite runs short, and other examples; ends with what was counted
	$(BIN)/python -m pytest -m stress -s $(ARGS)
	$(BIN)/python -m pytest --hypothesis-profile=explore -m "hypothesis and not live and not works" $(ARGS)

$(VENV)/.works: $(STAMP)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] > (3, 11))' || { echo "make works runs on Python 3.11: several of its libraries need torch"; exit 1; }
	$(INSTALL) $(TORCH) --editable ".[$(EXTRAS)]" --group dev --group works
	# They ask for pandas 2, an older pyarrow, and an OpenCV with windows.
	$(INSTALL) --no-deps "anndata>=0.12" "daft>=0.7" "ultralytics>=8.4"
	@touch $@

works: $(VENV)/.works  ## The tables of docs/works-with.md and docs/guide-serve.md, with all the libraries in them
	$(BIN)/python -m pytest $(TOGETHER) tests/libraries tests/server/test_clients.py -rs $(ARGS)
	$(BIN)/python -m pytest -m works tests/project/test_examples.py -rs

live: $(STAMP)  ## The contract at a real account: CACHEDFS_LIVE_DRIVE="My Drive/scratch"
	$(BIN)/python -m pytest -m live -rs $(ARGS)

check: $(STAMP)  ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/project/test_layering.py

$(VENV)/.rivals: $(STAMP)
	$(INSTALL) $(TORCH) --editable ".[$(EXTRAS)]" --group dev --group rivals
	@touch $@

bench: $(VENV)/.rivals  ## The benchmark tables; writes bench.json, fails on a missed number
	$(BIN)/python -m tests.benchmarks --json bench.json $(ARGS)

# Two gigabytes, and an older NumPy than ours.
MOSAIC = $(VENV)-mosaic
mosaic:  ## MosaicML Streaming in an environment of its own: `make bench` measures it where it is there
	$(PYTHON) -m venv --clear $(MOSAIC)
	$(MOSAIC)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) "mosaicml-streaming>=0.13"

$(DOCS_STAMP): pyproject.toml | $(STAMP)
	$(INSTALL) --editable ".[sim]" --group docs
	@touch $@

docs: $(STAMP) site  ## Run every code block of the documentation, and build it as a site in site/
	$(BIN)/python -m pytest tests/project/test_docs.py tests/project/test_messages.py tests/project/test_reference.py

# Not --quiet, which would hide warnings from --strict as well; the variable leaves out an advertisement of mkdocs-material's.
site: $(DOCS_STAMP)  ## The documentation as a site, in site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(STAMP)  ## Wheel and sdist in dist/, and proof that they work where nothing else is installed
	$(BIN)/python -m tests.release $(ARGS)

clean:  ## Remove all that these steps made
	rm -rf $(VENV) $(VENV)-newer $(VENV)-oldest $(VENV)-mosaic build dist site bench.json flaky.txt .mypy_cache .ruff_cache .hypothesis
