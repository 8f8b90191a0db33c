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
PYTHON_CODE := petit_cli petit_plugin integrations emulator csrc tests benchmarks examples tools setup.py

# Suites with a target of their own.
ELSEWHERE := $(addprefix --ignore=,tests/integrations tests/emulator tests/device tests/backends/hip)

.PHONY: help setup demo test test-fast test-slow test-vllm test-gpu lint format bench clean

help:
	@echo "make setup   check this machine and build the development environment ($(VENV))"
	@echo "make demo    quantise a real model to NVFP4 and ask it three questions through vLLM"
	@echo "make test    every test: fast ones, slow ones, the vLLM server, GPU code on the emulator"
	@echo "make lint    ruff, mypy and clang-format"
	@echo "make format  rewrite the code in the project's format"
	@echo "make bench   our linear layer beside torch's BF16 on this machine"

setup: $(VENV)/.installed

$(VENV)/.torch: tools/install_torch.py
	$(PYTHON) tools/check_system.py build
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) tools/install_torch.py $(TORCH) --cpu-index $(TORCH_CPU_INDEX)
	@touch $@

# build_backend.py prints a device compiler to install where this machine has none.
$(VENV)/.requirements: requirements/dev.txt csrc/build_backend.py $(VENV)/.torch
	$(PY) -m pip install --quiet -r requirements/dev.txt
	$(PY) csrc/build_backend.py | xargs -r $(PY) -m pip install --quiet
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

test: test-fast test-slow test-vllm test-gpu

test-fast: $(VENV)/.installed
	$(PY) -m pytest -m "not slow and not server and not framework" $(ELSEWHERE) $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(PY) -m pytest -m "slow and not server and not framework" $(ELSEWHERE) $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_PY) -m pytest -m framework tests/formats/test_tiny_models.py $(PYTEST_ARGS)
	$(VLLM_PY) -m pytest tests/integrations/vllm $(PYTEST_ARGS)

# After test-vllm, which makes the real checkpoint that one of these tests reads.
test-gpu: $(VENV)/.installed
	$(PY) -m pytest tests/emulator tests/device tests/backends/hip $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(PY) -m ruff check $(PYTHON_CODE)
	$(PY) -m ruff format --check $(PYTHON_CODE)
	$(PY) -m mypy
	find csrc emulator -name '*.[ch]pp' | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: $(VENV)/.installed
	$(PY) -m ruff check --fix $(PYTHON_CODE)
	$(PY) -m ruff format $(PYTHON_CODE)
	find csrc emulator -name '*.[ch]pp' | xargs $(VENV)/bin/clang-format -i

bench: $(VENV)/.installed
	$(PY) -m benchmarks.linear

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info petit_plugin/_native*.so
