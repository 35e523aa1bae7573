# Everything runs in an environment inside the clone, pinned by constraints.txt and built on first use.
#   make demo       train a small Llama on 8 simulated devices, resume, sample text, export, compare with torch
#   make test       default tests        make test-slow   the long ones        make test-all   both
#   make venv-torch adds torch and transformers      make test-bridge   default tests of the bridge, which need them
#   make lint       ruff, types, import arrows
#   make test-gpu-compile   compile for GPUs with JAX's CUDA plugin, in an environment of its own; needs no GPU
#   make bench      the numbers of the README's table        make bench-bridge   those of docs/bridge.md
#   make venv       the environment alone

VENV := .venv
CONSTRAINTS := constraints.txt
EXTRA := dev
WORKERS := 2
# The first interpreter that starts, is 3.11 or newer and can build environments (a shim may be on PATH and not start).
PYTHON := $(shell for python in python3.11 python3 python3.12 python3.13; do \
	if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
BIN := $(VENV)/bin
comma := ,
# Another set of extras is installed beside what is there.
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRA))
TORCH_STAMP := $(VENV)/.installed-with-torch
# Where else pip may look for torch, such as an index of builds without CUDA.
TORCH_INDEX :=

.PHONY: venv venv-torch demo test test-bridge test-slow test-all test-gpu-compile bench bench-bridge lint format clean

venv: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv found; name one: make venv PYTHON=/path/to/python" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing jaxpar[$(EXTRA)] into $(VENV) ($(CONSTRAINTS))"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[$(EXTRA)]"
	@touch $@

venv-torch: $(TORCH_STAMP)

$(TORCH_STAMP): $(STAMP) constraints-torch.txt
	@echo "installing jaxpar[$(EXTRA),torch] into $(VENV) ($(CONSTRAINTS), constraints-torch.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --constraint constraints-torch.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable ".[$(EXTRA),torch]"
	@touch $@

demo: venv-torch
	@$(BIN)/python scripts/demo.py

test: venv
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" --ignore tests/bridge

test-bridge: venv-torch
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" tests/bridge

# Those of tests/bridge are among them where torch is installed.
# pytest exits with 5 when nothing is marked slow.
test-slow: venv
	$(BIN)/python -m pytest -q -n $(WORKERS) -m slow || [ $$? -eq 5 ]

test-all: venv-torch
	$(BIN)/python -m pytest -q -n $(WORKERS)

# The plugin is half a gigabyte of wheels: an environment of its own. CPU is the platform, whatever the machine has.
test-gpu-compile:
	$(MAKE) venv VENV=.venvgpu CONSTRAINTS=constraints-cuda.txt EXTRA=test,cuda
	JAX_PLATFORMS=cpu .venvgpu/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m gpu_compile tests/plan

bench: venv
	$(BIN)/python scripts/bench.py

bench-bridge: venv-torch
	$(BIN)/python scripts/bench_bridge.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv312 .venvgpu .jax_cache .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis *.egg-info
