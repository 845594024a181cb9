# make train    a real model learns from real text, with nothing set up before
# make test     the tests, on the CPU
# make check    what a change must pass: format, lint, types, tests

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Where no GPU is seen, the CPU build of this version is enough; an unpinned torch may bring gigabytes of CUDA.
TORCH = $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

.PHONY: train test check clean

train: $(VENV)/installed
	$(RUN) -m forge.train

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist loadgroup -m "not gpu"

check: $(VENV)/installed-test
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(MAKE) test

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "$(TORCH)" numpy
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(RUN) -m pip install --quiet --editable ".[text,test]"
	touch $@

clean:
	rm -rf $(VENV)
