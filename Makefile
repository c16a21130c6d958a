# Everything runs in .venv with the versions of constraints.txt; `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# No hub is needed, and none is asked.
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Of what is installed, Python compiles what is imported, once. The environment may forbid that: then each of the many
# processes that tests start would compile again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test quick lint slow gpu docs clean

demo: $(VENV)/installed-demo
	rm -rf outputs/demo
	$(BIN)/hf-dp train --config recipes/demo/minilm_dp_adam.yaml

# Lint and types run beside the tests, since neither keeps two cores busy alone.
test: $(VENV)/installed-test
	@$(MAKE) --no-print-directory lint > $(VENV)/lint.log 2>&1 & lint=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal; tested=$$?; \
	wait $$lint; linted=$$?; cat $(VENV)/lint.log; exit $$((tested | linted))

# The loop of a developer, under a minute: layers, exactness of each architecture, gate, ledger, and
# epsilons against the oracle.
QUICK = tests/test_layering.py tests/clipping/test_architectures.py tests/clipping/test_exactness.py \
	tests/run/test_gate.py tests/trainer/test_run_ledger.py \
	tests/accounting/test_ledger.py tests/accounting/test_golden.py::test_grid \
	tests/accounting/test_golden.py::test_the_oracle_agrees_with_the_grid

quick: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(QUICK) \
		-k '(not test_architectures and not whole_run) or (test_equals_the_loop and padded)'

slow: $(VENV)/installed-slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# The first minutes on a GPU (recipes/gpu/README.md), with what is installed beside PYTHON; nothing is installed here.
GPU_TESTS = tests/clipping/test_architectures.py tests/clipping/test_engine_contract.py tests/clipping/test_sensitivity.py \
	tests/clipping/test_sharded.py tests/clipping/test_compiled.py tests/test_noise.py

gpu:
	@$(PYTHON) -c "import sys, torch; torch.cuda.is_available() or sys.exit('make gpu needs a CUDA device, and torch sees none.')"
	@PYTHONPATH=. timeout 180 $(PYTHON) -m pytest -q -m gpu $(GPU_TESTS); tested=$$?; \
	PYTHONPATH=. $(PYTHON) recipes/gpu/measure.py outputs/gpu.json --seconds 300; measured=$$?; exit $$((tested | measured))

# The site, in outputs/site. A dead link, a missing picture, a name that does not exist: each ends it.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file .github/site/mkdocs.yml
	@echo "outputs/site: look at it with $(BIN)/python -m http.server --directory outputs/site"

lint: $(VENV)/installed-test
	$(BIN)/ruff check hf_dp tests recipes
	$(BIN)/ruff format --check hf_dp tests recipes
	$(BIN)/mypy

# torch first and exactly: a range would let pip take a build with gigabytes of CUDA libraries on a machine without a GPU.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile torch -c constraints.txt
	touch $@

$(VENV)/installed-demo: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile -e '.[demo]' -c constraints.txt
	touch $@

$(VENV)/installed-test: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile -e '.[test]' -c constraints.txt
	touch $@

# Not for `test`: what imports peft then imports bitsandbytes, too, which takes longer than many a test.
$(VENV)/installed-slow: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --no-compile -e '.[quantized,ray]' -c constraints.txt
	touch $@

$(VENV)/installed-docs: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile -e '.[trl,embeddings,docs]' -c constraints.txt || \
		{ echo "make docs installs MkDocs once, which needs a package index." >&2; exit 1; }
	touch $@

clean:
	rm -rf $(VENV) outputs build *.egg-info
