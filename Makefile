# `make demo` and `make test` need Python 3.11 or newer and a package index; everything else they install
# into .venv, once. Another interpreter: make test PYTHON=python3.12

PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready

.DELETE_ON_ERROR:
.PHONY: help demo test check docs notebooks torture audit release-check clean

help:
	@echo "make demo    real digits: compress, removal and RepL in one table and one picture; two minutes"
	@echo "make test    lint, types and the whole test suite"
	@echo "make check   lint, types and layers only"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make notebooks  run the notebooks and store what comes out"
	@echo "make torture kills, random and library models, hostile files, threads, large models; resumes where it was"
	@echo "make audit   known faults of the pinned packages, where the package index tells them"
	@echo "make release-check  wheel and sdist, twine check, and the wheel in a bare environment"
	@echo "make clean   remove .venv and the caches"

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py --out runs/demo

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# each writes benchmarks/results/torture_NAME.json; half an hour together on two cores
torture: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.generated
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.hostile
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.edits
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.threads
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.third_party
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.full_disk
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.kills
	OMP_NUM_THREADS=1 $(BIN)/python -m torture.scale

# pip-audit asks a service of the internet; where it can't be reached it says so and fails, and checks nothing
audit: $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints constraints.txt pip-audit
	@mkdir -p build && sed 's/===/==/' constraints.txt > build/audited.txt  # pip-audit does not know ===
	$(BIN)/python -m pip_audit --requirement build/audited.txt --no-deps --disable-pip --strict

notebooks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/jupyter execute --inplace docs/notebooks/*.ipynb

release-check: $(READY)
	.ci/release_check.sh

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "The site is build/site/index.html; its search works when it is served: python -m http.server -d build/site"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("replearn needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; write: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python --constraints constraints.txt --build-constraints constraints.txt \
		--editable ".[all]" --group dev
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
