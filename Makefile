# Everything starts here: `make help`. Each target first has the set-up done, which takes a second when it is.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python -m

# Images of Python set it. Each process would then compile the modules, and each worker of the tests rewrite them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo up cluster test test-fast test-long test-s3 soak soak-producer infer-trial bench lint format lock jars-lock packages-by-pip class-archives clean

help: ## Show what can be done
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(VENV)/ready-project ## Have everything in place: virtual environment, locked packages, checked jars
	@$(RUN) dev.jars

# Archives save seconds of each JVM's start and take a minute to write: for what starts many JVMs.
class-archives: setup
	@$(RUN) dev.class_archives

demo: setup ## From nothing to slices in Delta tables, checked against the generator's account; ends by itself
	@$(RUN) dev.demo

up: setup ## Broker, Spark, Dagster's UI and daemon, generator, until Ctrl-C
	@$(RUN) dev.up $(ARGS)

# One more than cores, since a stack of processes leaves half of two cores idle. The longest tests start whole stacks:
# four of them at once on two cores took each other's time and ended at their time-outs, so one worker has them all.
WORKERS ?= 3

TEST = pytest -n $(WORKERS) --dist worksteal --durations 40

# Types take one core for a minute, and so do the archives.
test: setup ## What CI runs: lint, types, and all tests but the longest
	@$(MAKE) --no-print-directory --jobs 2 lint class-archives
	$(RUN) $(TEST) -m "not long"

# No stack is among them, and some wait.
test-fast: WORKERS = 4
test-fast: setup ## The tests that need no JVM and little time
	$(RUN) $(TEST) -m "not slow"

test-long: class-archives ## What `make test` leaves out: long series of processes killed, whole stacks, a million records
	$(RUN) $(TEST) -m long

test-s3: class-archives ## A lake on an S3 server of this machine: two drivers at once, a kill, backfill, maintenance, erasure, audit
	$(RUN) pytest --durations 10 tests/integration/test_s3.py tests/resources/test_object_store.py

soak: class-archives ## A million faulty records while 100 processes are killed, then each is accounted for: an hour or two
	@$(RUN) dev.soak $(ARGS)

soak-producer: class-archives ## Producers for minutes while brokers are killed, hang and are all unavailable; then slices of what they wrote
	$(RUN) pytest tests/integration/test_acknowledged.py -m long

infer-trial: setup ## Six unknown topics of 100,000 records to tables by a new user's commands, by the clock: half an hour
	@$(RUN) dev.infer_trial $(ARGS)

cluster: setup ## Three brokers that form one cluster, until Ctrl-C
	@$(RUN) dev.cluster $(ARGS)

bench: class-archives ## Measure, and write docs/benchmarks.md
	@$(RUN) bench $(ARGS)

lint: setup ## Rules, format and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Put the code into its format, mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

LOCKING = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--no-emit-index-url --no-emit-find-links

lock: setup ## Choose the newest allowed Python packages and lock them with hashes
	$(LOCKING) --upgrade requirements-build.in --output-file requirements-build.lock
	$(LOCKING) --upgrade --extra dev pyproject.toml --output-file requirements.lock
	$(LOCKING) --extra kubernetes --extra s3 --constraint requirements.lock pyproject.toml --output-file deploy/requirements.lock

jars-lock: $(VENV)/ready-project ## Record the jars and their checksums in highwater/resources/jars.lock
	@$(RUN) dev.jars --lock

clean: ## Remove all that was made, downloads too; asks nothing
	rm -rf $(VENV) .highwater build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# A mark, not the program: an interrupted `venv` leaves a Python without pip, and is made again.
$(VENV)/ready-venv:
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "error: '$(PYTHON)' is no Python 3.11; install it (Debian: apt-get install python3.11-venv)," \
	    "or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: '$(PYTHON)' makes no virtual environments; Debian: apt-get install python3.11-venv" >&2; exit 1; }
	@touch $@

PIP = $(BIN)/python -m pip --disable-pip-version-check install --require-hashes --retries 5

# PySpark comes as source, and its wheel of 460 MB is packed only to be unpacked: without compression.
LOCKED = --no-build-isolation --config-settings=--build-option=--compression=stored -r requirements.lock

# uv downloads and compiles in parallel. It reads no configuration of pip's but the index that is passed on here; where it
# fails, behind a proxy with a certificate of its own for example, pip goes on.
$(VENV)/ready-packages: requirements-build.lock requirements.lock $(VENV)/ready-venv
	@echo "Installing the locked Python packages: once, about a minute ..."
	@sed -n '/^uv==/,/# via/p' requirements.lock > $(VENV)/uv-requirements.txt
	@$(PIP) --quiet -r requirements-build.lock -r $(VENV)/uv-requirements.txt
	@index="$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2>/dev/null)}"; \
	  $(BIN)/uv pip install --python $(BIN)/python --require-hashes --compile-bytecode --no-progress \
	    $${index:+--default-index "$$index"} $(LOCKED) || $(MAKE) --no-print-directory packages-by-pip
	@touch $@

packages-by-pip:
	@echo "uv could not install the packages; pip goes on ..."
	@set -o pipefail; $(PIP) --no-compile --progress-bar off $(LOCKED) \
	  | { grep --line-buffered -E '^ *(Downloading|Building|Installing|Successfully)' || true; } | cut -c1-100 \
	  || { echo "error: pip could not install everything, see above; the next call goes on from here" >&2; exit 1; }
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

$(VENV)/ready-project: pyproject.toml $(VENV)/ready-packages
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

SHELL := /bin/bash
