# Everything a developer does, from a fresh clone: make setup, make train, make test, make check.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=
# Tests run three at a time, since many of them wait for processes. A test that hangs ends its process (pyproject.toml), which starts once more
# and repeats it. Processes that tests start share compiled modules, also where the environment says to keep none.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal --max-worker-restart 1

.PHONY: setup train train-moe test nightly soak mutants check docs format wheel clean

# The environment: made once, and again only when what it is made from has changed.
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "Shardwise needs Python 3.11 or later, and $(PYTHON) is not. Write: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; echo \
	  "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	  -c constraints.txt -e '.[dev,docs,hf,data,trackers,recipes]'
	@touch $@

# The main job: a small GPT on real text, every state sharded over two local processes.
# ARGS adds to the command: make train ARGS=--overwrite
train: setup
	$(BIN)/shardwise train examples/quickstart.toml --nproc 2 --plan "dp2 zero3" $(ARGS)

# The same with a mixture of experts, each expert on one of the two processes.
train-moe: setup
	$(BIN)/shardwise train examples/moe.toml --nproc 2 $(ARGS)

test: setup
	$(TESTS) $(ARGS)

# All tests, not the core alone (tests/conftest.py), and a long soak. CI runs a part of them.
# ARGS='-m ""' runs all combinations too.
nightly: setup
	$(TESTS) -m "not combination" $(ARGS)
	$(BIN)/python -m tests.soak --minutes 30

# Runs under a seeded schedule of faults, compared with undisturbed ones: make soak ARGS="--minutes 60"
# Two ranks that must not grow in many tiny steps: make soak ARGS="--steps 100000"
soak: setup
	$(BIN)/python -m tests.soak $(ARGS)

# Which core test notices each mutation of the catalogue, and which mutations none does.
mutants: setup
	$(BIN)/python -m tests.mutants $(ARGS)

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/python -m pytest -q -m '' tests/test_house.py

# The documentation site, in site/: pages of the reference are written from the program, and a link
# that leads nowhere is an error.
docs: setup
	$(BIN)/python -m docs.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

wheel: setup
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
