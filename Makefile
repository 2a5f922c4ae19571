# Two commands set everything up on a machine with Python 3.11+ and make:
#   make demo   trains and shows both systems on data made on the fly
#   make test   lints, type-checks, tests (the numbers as on several processors), runs the doctests and builds the documentation
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0

# What make test does; one that fails does not keep the others from being done.
STEPS  := lint types unit portable doctest docs
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
NUMERICAL := $(wildcard $(addprefix tests/,functional paper nn spd solvers vision/segmentation))

# Settings, joined by commas, with which torch and MKL take the code that they have for other processors.
PROCESSORS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=avx512 \
  MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2
PORTABLE   := ATEN_CPU_CAPABILITY=default,MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=avx2,MKL_CBWR=COMPATIBLE,OMP_NUM_THREADS=2

.PHONY: demo test $(STEPS) coverage processors versions bench clean

$(VENV)/.user: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[all]"
	touch $@

$(VENV)/.dev: $(VENV)/.user
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/.user
	$(BIN)/matbackprop demo

test: $(VENV)/.dev
	@failed=""; for step in $(STEPS); do \
	  echo "== make $$step"; $(MAKE) --no-print-directory $$step || failed="$$failed $$step"; \
	done; \
	if [ -n "$$failed" ]; then echo "== failed:$$failed"; exit 1; fi; echo "== passed: $(STEPS)"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST)

# Which lines the tests run; what no test runs is listed, most of it code for GPUs.
coverage: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST) --cov --cov-report=term-missing:skip-covered --cov-report=json:build/coverage.json

# The numerical tests as on other processors: the most different two in make test, all of them here.
portable:
	@$(MAKE) --no-print-directory processors PROCESSORS="$(PORTABLE)"

processors: $(VENV)/.dev
	@failed=0; for settings in $(PROCESSORS); do \
	  echo "== $$settings"; \
	  env OMP_NUM_THREADS=1 $$(echo $$settings | tr , ' ') $(PYTEST) -q -r fE --durations=0 --durations-min=30 \
	    -m "not slow and not cuda" -k "not compil" $(NUMERICAL) || failed=1; \
	done; exit $$failed

# The tests at every Python, with the newest packages and, at the oldest, with the lowest versions that pyproject.toml promises.
VERSIONS     ?= 3.11-lowest 3.12-newest 3.13-newest
ENVIRONMENTS ?= build/versions
UV           ?= $(BIN)/uv
VERSION_TESTS ?=

versions: $(UV)
	@failed=""; for version in $(VERSIONS); do \
	  echo "== $$version"; $(MAKE) --no-print-directory version-$$version || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "== failed:$$failed"; exit 1; fi; echo "== passed: $(VERSIONS)"

version-%-lowest: WANTED := --resolution lowest-direct --editable ".[test]"
version-%-newest: WANTED := "$(TORCH)" --editable ".[test,onnx]" onnxruntime
version-%: $(UV)
	$(UV) venv --quiet --allow-existing --python $(firstword $(subst -, ,$*)) $(ENVIRONMENTS)/$*
	$(UV) pip install --quiet --python $(ENVIRONMENTS)/$*/bin/python $(WANTED)
	OMP_NUM_THREADS=1 $(ENVIRONMENTS)/$*/bin/python -m pytest -n 2 --dist worksteal -q $(VERSION_TESTS)

$(BIN)/uv: $(VENV)/.user
	$(BIN)/python -m pip install --quiet uv

doctest: $(VENV)/.dev
	$(BIN)/python -m pytest --doctest-modules --doctest-continue-on-failure -q src/matbackprop

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks speed

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache
