# Two commands matter: `make demo` and `make test`. Both set everything up by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The torch that tests run on. It is installed before anything that depends on torch, so that no
# other torch is pulled in; triton is the release that this torch pins.
TORCH := torch==2.13.0
TRITON := triton==3.7.1
WORKERS ?= 2
CXX_SOURCES := $(shell find csrc -type f)

.PHONY: demo test test-install dist browser test-triton-newest soak bench gpu-check docs lint format info clean

demo: $(VENV)/built
	$(BIN)/zclip-bench --quick
	$(BIN)/heal demo --run-dir build/heal-demo

# Workers share the cores, so that each computes with one thread; tests of threads set their own number.
# Files stay whole: tests of one file may share a build or a world of ranks. A worker that crashes ends
# the run: xdist would start another, and then wait for ever for tests that nobody runs.
test: lint $(VENV)/built browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --max-worker-restart=0

# The browser that reports are tested in. Without one, and without the means to install it, those tests
# are skipped and say so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || test -n "$$HEAL_TEST_BROWSER" || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  { apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 || \
	    { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1; }; } || \
	echo "no browser: tests of the report in Chromium will be skipped"

# The tests that concern Triton once more, with the newest release instead of the one torch pins.
test-triton-newest: $(VENV)/built
	$(BIN)/pip install -q --no-deps --upgrade --target build/triton-newest triton
	PYTHONPATH="$(CURDIR)/build/triton-newest" $(BIN)/python -m pytest -q -k triton

soak: $(VENV)/built test-triton-newest
	$(BIN)/python -m pytest -q -m slow

# Fresh environments by every route. pip isolates the builds, so that an index must be in reach.
test-install: $(VENV)/built
	$(BIN)/python -m pytest -q -m 'slow or not slow' tests/test_packaging.py -k 'not cuda_kernels'

# The sdist, a wheel with kernels for this machine and the pure-Python wheel, into dist/, checked.
dist: $(VENV)/tools
	rm -rf dist
	$(BIN)/pip install -q build twine
	$(BIN)/python -m build -q --no-isolation
	ZCLIP_BUILD=none $(BIN)/python -m build -q --no-isolation --wheel
	$(BIN)/twine check --strict dist/*

# Writes tables and plots. To try whether all of it works: make bench BENCH=--quick RESULTS=build/bench
BENCH ?=
RESULTS ?= benchmarks/results
FOREACH := --op clip_grad_norm_ --shapes gpt2-small llama-8b-block 2000-small --dtype float32 bfloat16 --backend foreach
bench: $(VENV)/built
	$(BIN)/zclip-bench $(BENCH) --save $(RESULTS)
	$(BIN)/zclip-bench $(FOREACH) --json $(RESULTS)/foreach.json
	$(BIN)/zclip-bench $(FOREACH) --clipped --json $(RESULTS)/foreach-clipped.json
	$(BIN)/python benchmarks/bench_step.py $(BENCH) --save $(RESULTS)
	$(BIN)/python benchmarks/spikes_gpt.py $(BENCH) --save $(RESULTS)
	$(BIN)/python benchmarks/bench_loop.py --save $(RESULTS)
	$(BIN)/python -m benchmarks.update_readme $(RESULTS)
	$(BIN)/python benchmarks/bench_heal.py --save $(RESULTS)
	$(BIN)/python benchmarks/bench_checkpoint.py $(BENCH) --save $(RESULTS)
	$(BIN)/python -m pytest -q benchmarks $(BENCH) --benchmark-quiet

# For a person with a GPU: builds, tests, sanitizes and measures on it, and writes one report to send back.
# Wants a Python whose torch sees the GPU, so it does not use the .venv: make gpu-check PYTHON=python3 GPU_CHECK=--quick
GPU_CHECK ?=
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(GPU_CHECK)

# The documentation, into site/. A warning is an error.
docs: $(VENV)/tools
	$(BIN)/python docs/update_config.py
	$(BIN)/python docs/update_healing.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/tools
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/tools
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

info: $(VENV)/built
	$(BIN)/python -m zclip.info

clean:
	rm -rf $(VENV) build dist site *.egg-info zclip/_C*.so

$(VENV)/torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q $(TORCH) numpy 'setuptools>=77' wheel
	$(BIN)/pip install -q --no-deps $(TRITON)
	touch $@

$(VENV)/tools: $(VENV)/torch pyproject.toml setup.py
	ZCLIP_BUILD=none $(BIN)/pip install -q --no-build-isolation -e '.[dev]'
	touch $@

$(VENV)/built: $(VENV)/tools $(CXX_SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@
