# Every target sets up what it needs: a virtual environment in .venv, pinned by constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first Python that really runs and has the right version: a launcher on the PATH may exist and yet fail.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' >/dev/null 2>&1 \
	&& { command -v "$$p"; break; }; done)
PACKAGES := envs marl experiments
# Tests never touch the network, each of their two processes computes on one thread, and bytecode is kept, also where it
# is switched off. Assertions are rewritten for the tests that failed alone, which saves both processes seven seconds.
TEST_ENV := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true \
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# A file's tests stay together, so that what they share is made once; long files come before the short ones of marl.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help quickstart negotiation web test test-slow test-browser torture hostile lint docs format bench gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(STAMP) ## train and compare Among Us crews without and with the two terms, 6 to 8 minutes on two cores
	@$(BIN)/python -m experiments.train experiment=among_us_quickstart

negotiation: $(STAMP) ## train and measure a small negotiator, about 5 minutes on two cores
	@$(BIN)/python -m experiments.train experiment=dond_quickstart

web: $(STAMP) ## open the page to play, to watch recorded games and to follow runs, http://127.0.0.1:8700
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev,web]' --constraint constraints.txt
	@$(BIN)/python -m experiments.web open=true

test: $(STAMP) ## every test but the slow ones
	@$(TEST_ENV) $(BIN)/python -m pytest -q -rs $(TWO) --assert=plain -m "not slow" \
		|| { $(TEST_ENV) $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures=none -m "not slow"; exit 1; }

test-slow: $(STAMP) ## the slow tests
	@$(TEST_ENV) $(BIN)/python -m pytest -q -rs $(TWO) -m slow

test-browser: $(STAMP) ## the web page in the Chromium of this machine, with every game by mouse, keyboard and on a phone
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev,browser]' --constraint constraints.txt
	@$(TEST_ENV) $(BIN)/python -m pytest -q -rs tests/experiments/webapp/test_browser*.py

torture: $(STAMP) ## kill small runs of every kind at random moments, and compare their ends; hours
	@$(TEST_ENV) $(BIN)/python -m tests.torture

hostile: $(STAMP) ## give all entry points 10,000 generated bad inputs; 5 to 30 minutes
	@$(TEST_ENV) $(BIN)/python -m tests.hostile

lint: $(STAMP) ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(PACKAGES)

docs: $(STAMP) ## build the documentation into site/; fails where a link, a command or a setting does not exist
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev,docs]' --constraint constraints.txt
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet warnings would not count
	@$(TEST_ENV) $(BIN)/python -m pytest -q -rs tests/experiments/launch/test_pages.py tests/docs \
		-k "not notebook and (pages or examples or each_command or README or tutorial)"  # settings of all pages, and what one types first

format: $(STAMP) ## put the code into the style that lint asks for
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(STAMP) ## speed of rollouts and updates beside generate and TRL, about half an hour
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev,bench]' --constraint constraints.txt
	@$(BIN)/python -m experiments.benchmark

gpu: $(STAMP) ## check a GPU, measure speed on it and let a model learn, 8 minutes; the same command goes on
	@$(BIN)/python -m pip show -qq trl 2>/dev/null || $(BIN)/python -m pip install -qq --disable-pip-version-check \
		--editable '.[dev,bench]' --constraint constraints.txt || echo "TRL could not be installed: it is not measured." >&2
	@$(BIN)/python -m experiments.gpu

clean: ## remove the virtual environment and all caches, but no run
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(PACKAGES) conf tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 with venv was found; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2>/dev/null \
		|| { echo "$(PYTHON) is not a working Python 3.11 to 3.13 with venv; name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON), a few minutes the first time ..."
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	@touch $@
