# Everything runs in .venv, made from constraints.txt on first use.
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test check format bench clean

setup: $(READY)  ## make .venv with everything

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt torch
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev,train,bench]'
	touch $@

demo: $(READY)  ## the main job on a real model and a real novel, about 4 minutes
	$(VENV)/bin/longspan plan smollm2 --to 12288
	$(VENV)/bin/longspan evaluate smollm2 --text moby-dick --length 12288 --documents 1 \
	    --methods none,linear,yarn --bucket 1024 --output longspan-results/demo --force

# One torch thread a test worker: two workers on two cores.
test: $(READY)  ## all tests, doctests and README blocks
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

check: $(READY)  ## format, lint, types, tests
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright
	$(MAKE) test

format: $(READY)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(READY)  ## speed, as ratios in one run; keep the machine quiet
	$(PY) benchmarks/rotary.py --json docs/results/rotary.json
	$(PY) benchmarks/attention.py --json docs/results/attention.json \
	    --figure docs/results/attention.png
	$(PY) benchmarks/streaming.py --json docs/results/streaming.json
	$(PY) benchmarks/training.py --json docs/results/training.json
	$(PY) benchmarks/recurrence.py --json docs/results/recurrence.json

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis longspan-results
