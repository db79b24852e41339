# make train     set up and run the main job: a GPT with its state on NVMe, inside a memory limit
# make test      set up and run the tests (the quick ones)
# make test-all  the slow ones too
# make check     ruff, mypy --strict, floors
# make bench     every benchmark

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCHES = $(filter-out bench/adapter.py bench/common.py bench/_%,$(wildcard bench/*.py))

.PHONY: train test test-all check bench

train: $(INSTALLED)
	mkdir -p runs/nvme
	$(BIN)/python tools/cgroup.py --limit 576MiB -- $(BIN)/infinity train examples/tiny.toml

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy infinity
	$(BIN)/python tools/floors.py

bench: $(INSTALLED)
	set -e; for script in $(BENCHES); do echo "== $$script"; $(BIN)/python $$script; done

# The environment, made once; again when what it is made from changes.
$(INSTALLED): requirements-dev.txt pyproject.toml setup.py $(wildcard native/*.c native/*.h native/*.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -e .
	touch $@
