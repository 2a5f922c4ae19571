# make demo       train both systems on synthetic data and show the results
# make test       lint, types, quick tests, doctests and documentation: every change must pass it
# make test-all   also slow tests, tests on data sets, other processor settings and the newest torch
#
# Needs Python 3.11 or later. Tests on data sets run if MATBACKPROP_DATA names a folder.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
NEWEST := .venv-newest/bin
PYTEST := -m pytest -q -n 2 --dist worksteal
QUICK  := -m "not slow and not data"

# Tests of rounding errors, and settings that make torch and MKL use their code for other processors.
NUMERICAL := $(addprefix tests/,functional solvers spd test_refinement.py vision/metrics vision/segmentation) \
  -k "not (compil or transform or shapes or errors or bad or gradgradcheck or adversarial)"
PROCESSORS ?= ATEN_CPU_CAPABILITY=default,MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
  ATEN_CPU_CAPABILITY=avx2,MKL_CBWR=COMPATIBLE,OMP_NUM_THREADS=2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.PHONY: demo test test-all test-more lint types unit doctest docs slow browser processors newest versions coverage clean \
  table1 table2 backbones bsds500 baselines

.venv/.user: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[all]"
	touch $@

.venv/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[dev]"
	touch .venv/.user $@

.venv-newest/.test: pyproject.toml
	test -x $(NEWEST)/python || $(PYTHON) -m venv .venv-newest
	$(NEWEST)/python -m pip install --quiet --upgrade torch torchvision timm --editable ".[test]"
	touch $@

demo: .venv/.user
	$(BIN)/matbackprop demo

# Two jobs at a time; if one fails, the others still run.
test: .venv/.dev
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync unit docs doctest types lint

test-all: test
	@$(MAKE) --no-print-directory test-more

test-more: .venv/.dev
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync slow processors newest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	! git grep -niIE -f docs/plain_words.txt -- '*.py' '*.md' '*.cu' '*.cuh' ':!results' ':!benchmarks/results'

types: .venv/.dev
	$(BIN)/mypy

unit: .venv/.dev
	$(BIN)/python $(PYTEST) $(QUICK)

doctest: .venv/.dev
	$(BIN)/python -m pytest -q --doctest-modules --doctest-continue-on-failure src/matbackprop

docs: .venv/.dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

slow: .venv/.dev
	$(BIN)/python $(PYTEST) -m "(slow or data) and not browser"

# The web page in headless Chromium, which must be installed.
browser: .venv/.dev
	$(BIN)/python -m pytest -q -m browser

processors: .venv/.dev
	@failed=0; for settings in $(PROCESSORS); do \
	  echo "== $$settings"; \
	  env $$(echo $$settings | tr , ' ') $(BIN)/python $(PYTEST) $(QUICK) $(NUMERICAL) || failed=1; \
	done; exit $$failed

# The newest torch with torchvision and timm: all operators, CUDA kernels compiled by its NVRTC, one test per package.
newest: .venv-newest/.test
	$(NEWEST)/python $(PYTEST) $(QUICK) tests/functional/test_operator_* tests/nn tests/cuda/test_cuda_compiler.py \
	  tests/vision/models $(addprefix tests/vision/,inference/test_segmenting.py metrics/test_metrics_torch.py \
	  segmentation/test_spectral_segment.py training/test_engine_resume.py training/test_hub_presets.py)

# Other Python versions, and the lowest versions that pyproject.toml allows; uv downloads them.
VERSIONS ?= 3.11-lowest 3.12-newest 3.13-newest
versions: $(VERSIONS:%=version-%)
version-%-lowest: OPTIONS := --resolution lowest-direct
version-%: .venv/.user
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --quiet --allow-existing --python $(firstword $(subst -, ,$*)) build/versions/$*
	$(BIN)/uv pip install --quiet --python build/versions/$*/bin/python $(OPTIONS) --editable ".[test]"
	build/versions/$*/bin/python $(PYTEST) $(QUICK)

coverage: .venv/.dev
	$(BIN)/python $(PYTEST) --cov --cov-report=term-missing:skip-covered

# Published tables: finished runs are skipped; see docs/reproducing.md.
table1 table2 backbones bsds500 baselines: .venv/.user
	$(BIN)/python -m experiments $@

clean:
	rm -rf .venv .venv-newest build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
