# petit_plugin: `make demo` serves a real FP4 model, `make test` runs every test. No GPU, no sudo.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
TORCH ?= 2.13.0
# Used only when pip's own configuration offers no CPU build of torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PORT ?= 8000
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
VLLM_PY := $(VLLM_VENV)/bin/python
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml
VLLM_REQUIREMENTS := integrations/vllm/requirements-cpu.txt
PYTHON_CODE := petit_plugin integrations tests benchmarks examples tools setup.py

.PHONY: help setup demo test test-fast test-slow test-vllm lint format bench clean

help:
	@echo "make setup   check this machine and build the development environment ($(VENV))"
	@echo "make demo    quantise a real model to NVFP4 and ask it three questions through vLLM"
	@echo "make test    every test: fast ones, slow ones, then the vLLM server"
	@echo "make lint    ruff, mypy and clang-format"
	@echo "make format  rewrite the code in the project's format"
	@echo "make bench   our linear layer beside torch's BF16 on this machine"

setup: $(VENV)/.installed

$(VENV)/.torch: tools/install_torch.py
	$(PYTHON) tools/check_system.py build
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) tools/install_torch.py $(TORCH) --cpu-index $(TORCH_CPU_INDEX)
	@touch $@

$(VENV)/.requirements: requirements/dev.txt $(VENV)/.torch
	$(PY) -m pip install --quiet -r requirements/dev.txt
	@touch $@

$(VENV)/.installed: $(NATIVE_SOURCES) $(VENV)/.requirements
	$(PY) -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

$(VLLM_VENV)/.torch: tools/install_torch.py
	$(PYTHON) tools/check_system.py test
	test -x $(VLLM_PY) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) tools/install_torch.py $(TORCH) --cpu-index $(TORCH_CPU_INDEX)
	@touch $@

$(VLLM_VENV)/.requirements: $(VLLM_REQUIREMENTS) integrations/vllm/install_cpu.py $(VLLM_VENV)/.torch
	$(VLLM_PY) integrations/vllm/install_cpu.py
	@touch $@

$(VLLM_VENV)/.installed: $(NATIVE_SOURCES) $(VLLM_VENV)/.requirements
	$(VLLM_PY) -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

demo: $(VLLM_VENV)/.installed
	$(PYTHON) tools/check_system.py demo --port $(PORT)
	$(VLLM_PY) examples/demo.py --port $(PORT)

test: test-fast test-slow test-vllm

test-fast: $(VENV)/.installed
	$(PY) -m pytest -m "not slow and not server" --ignore=tests/integrations $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(PY) -m pytest -m "slow and not server" --ignore=tests/integrations $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_PY) -m pytest tests/integrations/vllm $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(PY) -m ruff check $(PYTHON_CODE)
	$(PY) -m ruff format --check $(PYTHON_CODE)
	$(PY) -m mypy
	find csrc -name '*.[ch]pp' | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: $(VENV)/.installed
	$(PY) -m ruff check --fix $(PYTHON_CODE)
	$(PY) -m ruff format $(PYTHON_CODE)
	find csrc -name '*.[ch]pp' | xargs $(VENV)/bin/clang-format -i

bench: $(VENV)/.installed
	$(PY) -m benchmarks.linear

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info petit_plugin/_native*.so
