# Parley. `make run` and `make test` do everything from a fresh clone; `make help` lists the rest.
# Needs: Python 3.11 or newer with pip, and make. Everything is installed into .venv.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run models test test-fast check format system clean

VENV := .venv
PY := $(VENV)/bin/python
# pip is asked nothing when this key has not changed: it covers what is installed and from where.
KEY := $(shell { cat pyproject.toml constraints.txt; pwd; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(KEY)

# The first Python that is new enough. Set PYTHON=/path/to/python to choose another.
# 3.11 comes first because constraints.txt was made with it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; \
	done)

FAST_TESTS = $(PY) -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) tests/unit

export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the targets
	@echo "Parley: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14
	@echo "Variables: PYTHON=python3.x, ARGS='options of parley serve', PYTEST_ARGS='options of pytest'"

run: $(STAMP)-run ## install, fetch the models, start the server (ARGS="--port 9000")
	@$(PY) -m app models fetch >/dev/null
	@exec $(PY) -m app serve $(ARGS)

models: $(STAMP)-run ## fetch the models and check every byte of them
	@$(PY) -m app models fetch >/dev/null
	@$(PY) -m app models verify

test: $(STAMP)-test system ## all tests: fast ones first, then real models, then the browser
	@$(PY) -m app models fetch >/dev/null
	@# Tests with models fill both cores alone; those without share them. All run, whatever failed.
	$(FAST_TESTS); fast=$$?; \
	$(PY) -m pytest $(PYTEST_ARGS) tests/integration tests/browser && exit $$fast

test-fast: $(STAMP)-test ## only the tests that need neither models nor a browser
	$(FAST_TESTS)

check: $(STAMP)-check ## ruff, mypy --strict, the layout test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/unit/project/test_layout.py

format: $(STAMP)-check ## let ruff rewrite the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

system: ## the Debian packages that tests need (a browser, a compiler...), where they can be installed
	@sh tests/support/install_system.sh

clean: ## remove .venv, caches and build output; models and data in PARLEY_HOME stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- installing -----------------------------------------------------------------------------------

$(STAMP)-run: EXTRAS := speech,webrtc
$(STAMP)-test: EXTRAS := speech,webrtc,test
$(STAMP)-check: EXTRAS := speech,webrtc,test,dev

$(STAMP)-run $(STAMP)-test $(STAMP)-check: $(STAMP)-venv
	@# PYTHONWARNINGS: setuptools greets every editable install with a banner of exclamation marks.
	PYTHONWARNINGS=ignore $(PY) -m pip install --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

# An environment that works is kept, so that nothing somebody put into it is lost.
# Debian's Python may come without ensurepip (its python3-venv package); virtualenv brings its own.
$(STAMP)-venv:
	@test -n "$(PYTHON)" || { \
		echo "Parley needs Python 3.11 or newer, and none was found. Install it, or say where it is:" >&2; \
		echo "  make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not Python 3.11 or newer." >&2; exit 1; }
	@if $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then :; \
	elif "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "making $(VENV) with $(PYTHON)"; rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); \
	elif "$(PYTHON)" -m pip --version >/dev/null 2>&1; then \
		echo "making $(VENV) with $(PYTHON) and virtualenv (this Python has no ensurepip)"; \
		rm -rf $(VENV) $(VENV)-bootstrap; \
		"$(PYTHON)" -m pip install --quiet --target $(VENV)-bootstrap virtualenv \
		&& PYTHONPATH=$(VENV)-bootstrap "$(PYTHON)" -m virtualenv --quiet $(VENV); \
		status=$$?; rm -rf $(VENV)-bootstrap; exit $$status; \
	else \
		echo "$(PYTHON) has neither ensurepip nor pip, so no environment can be made." >&2; \
		echo "Install one of them (on Debian: apt-get install python3-venv) and try again." >&2; exit 1; \
	fi
	@# An old pip may not know today's wheels or editable installs; the constraints pin a recent one.
	$(PY) -m pip install --quiet --upgrade --constraint constraints.txt pip setuptools
	@touch $@
