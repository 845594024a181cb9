# make train    a real model learns from real text, with nothing set up before
# make test     the tests, on the CPU
# make bench-smoke   every bench on a small model, on the CPU
# make check    what a change must pass: format, lint, types, tests

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Where no GPU is seen, the CPU build of this version is enough; an unpinned torch may bring gigabytes of CUDA.
TORCH = $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

# A model of a few milliseconds a step, and turns so short that they prove little: this shows that all of it runs.
SMOKE = hardware=cpu hardware.threads=1 model.width=32 model.layers=1 model.heads=2 model.kv_heads=2 model.head_width=16 \
    model.hidden=32 model.routing.num_experts=2 sequence_length=32 global_batch=4
SHORT = bench.timing.blocks=4 bench.timing.spare=0 bench.timing.steps=4 bench.timing.seconds=0.1 bench.timing.warmup=3
BENCH = $(RUN) -m forge.bench $(SMOKE)

# Kernels are tested in its interpreter where there is no GPU; with a GPU, torch says which version it wants.
TRITON = $(shell command -v nvidia-smi >/dev/null 2>&1 && echo triton || echo triton==3.6.0)

.PHONY: train test check bench-smoke clean

train: $(VENV)/installed
	$(RUN) -m forge.train

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist loadgroup -m "not gpu"

check: $(VENV)/installed-test
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(MAKE) test

bench-smoke: $(VENV)/installed
	$(BENCH) bench=aa $(SHORT) bench.max_floor=10
	$(BENCH) bench=ablation $(SHORT) bench.max_floor=10 bench.verify=false 'bench.switches=[loss=chunked,attention=eager]'
	$(BENCH) bench=path $(SHORT) bench.max_floor=10 'bench.path=[attention=eager,attention=sdpa,operators=handwritten]'
	$(BENCH) bench=telemetry $(SHORT) bench.timing.steps=10
	$(BENCH) bench=experts 'bench.shapes=[[64,32,16,8,2]]' bench.seconds=0.02 bench.calls=2 bench.square_size=256 \
	    bench.copy_mb=16 'bench.contenders=[dense,grouped_only,loop,sorted,fused,torchtitan_way,hf_way]'
	$(BENCH) bench=augment bench.num_pictures=4 bench.side=48 bench.size=32 bench.blocks=2 bench.seconds=0.05 \
	    'bench.contenders=[fused,cpu]'
	$(BENCH) bench=micro hardware.processes=2 bench.seconds=0.05 bench.updates=5 bench.shard_mb=4 'bench.copy_mb=[1,16]' \
	    'bench.square_sizes=[256,1024]' 'bench.all_reduce_bytes=[8,32768,1048576]'

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "$(TORCH)" numpy
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(RUN) -m pip install --quiet "$(TRITON)" --editable ".[text,test]"
	touch $@

clean:
	rm -rf $(VENV)
