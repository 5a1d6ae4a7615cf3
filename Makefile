# One word per job. Each target first puts what it needs into .venv; a second call finds it there.
#
#   make train [ARGS="..."]   train with the ready jobs (halfpeak train ...)
#   make test                 lint, types, pages and every test
#   make wheel                build the package, and try it in a new environment with nothing else
#   make fuzz [ARGS="..."]    compare random orders of calls with plain torch: --seed 7 --minutes 10
#   make fuzz-programs        the same for whole programs of calls: ARGS="--seed 7 --minutes 10"
#   make fuzz-readers         damaged files and state dicts, thousands: each is refused or read
#   make zoo [ARGS="..."]     models of transformers and timm at every level, beside torch.autocast: --only llama --level O2
#   make check                lint, format, types
#   make docs                 the pages, in docs/_build/html
#   make oracle               build mmcv 1.7.2 apart, and check what is recorded of it
#   make bench                every benchmark of speed and memory, on the CPU
#   make bench-gpu            the same on the accelerator, with the torch and triton already installed; ARGS=--quick tries it
#   make clean                remove what the targets made

PYTHON     ?= python3
GPU_PYTHON ?= python3
VENV       := .venv
BIN        := $(VENV)/bin
# Another PyTorch than that of constraints.txt: make test TORCH='torch==2.11.*'; TORCH=torch takes what is there, or the newest.
TORCH      ?=
VERSIONS   := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALL    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VERSIONS)
# Processes among which the tests are dealt out, each of about 1 GB; 0: none but pytest itself.
WORKERS    ?= logical
# plot.py draws what the others have measured.
# quality.py and peers.py train for half an hour.
BENCHMARKS := $(filter-out benchmarks/_% benchmarks/plot.py benchmarks/quality.py benchmarks/peers.py,$(wildcard benchmarks/*.py))

.DELETE_ON_ERROR:
.PHONY: train test wheel fuzz fuzz-programs fuzz-readers zoo check docs oracle bench bench-gpu clean

train: $(VENV)/.package
	$(BIN)/halfpeak train $(ARGS)

# One thread: the tensors of the tests are small, and other processes of the suite want the other cores.
test: $(VENV)/.tools
	$(MAKE) --jobs=2 --output-sync check docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(ARGS)

# The sdist is built from the clone, and the wheel from the sdist, as a release does.
wheel: $(VENV)/.python $(VERSIONS)
	@$(INSTALL) --group release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	PYTHONPATH=tests $(BIN)/python -m release.in_new_environment dist/*.whl

fuzz: $(VENV)/.tools
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m fuzz $(ARGS)

fuzz-programs: $(VENV)/.tools
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m fuzz.programs $(ARGS)

fuzz-readers: $(VENV)/.tools
	OMP_NUM_THREADS=1 HALFPEAK_THOROUGH=1 $(BIN)/python -m pytest tests/checkpoint/test_hostile_files.py \
	  tests/engine/test_hostile_states.py tests/reliability/test_hostile_front_ends.py $(ARGS)

zoo: $(VENV)/.tools
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m zoo $(ARGS)

check: $(VENV)/.tools
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

docs: $(VENV)/.tools
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

oracle: $(VENV)/.package .oracle/.mmcv
	OMP_NUM_THREADS=1 $(BIN)/python tests/runner/oracle/check.py .oracle/mmcv

# With the tools, because loops of other packages are measured beside halfpeak's.
bench: $(VENV)/.tools
	@set -e; for script in $(filter-out benchmarks/gpu_%,$(BENCHMARKS)); do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

# Those that say something about a GPU that the others do not.
bench-gpu:
	@set -e; for script in $(wildcard benchmarks/gpu_*.py) benchmarks/casting.py; do \
	  echo "== $$script"; PYTHONPATH=src $(GPU_PYTHON) $$script --device cuda $(ARGS); done

clean:
	rm -rf $(VENV) .oracle docs/_build build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "halfpeak needs Python 3.11 or newer and '$(PYTHON)' is not; write: make PYTHON=python3.12 $(MAKECMDGOALS)"; \
	  exit 1; }
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.3'
	@touch $@

# triton belongs to a build of torch.
$(VENV)/constraints.txt: $(VENV)/.python constraints.txt
	@{ grep -v '^torch==\|^triton==' constraints.txt; echo '$(TORCH)'; } > $@

$(VENV)/.package: $(VENV)/.python pyproject.toml $(VERSIONS)
	@echo "installing halfpeak and its extras into $(VENV), a minute or more ..."
	@$(INSTALL) --editable '.[all]'
	@touch $@

$(VENV)/.tools: $(VENV)/.package
	@echo "installing the tools of tests, checks and docs into $(VENV) ..."
	@$(INSTALL) --group test --group check --group docs
	@$(INSTALL) --no-deps timm
	@touch $@

# mmcv's setup.py needs pkg_resources, which newer setuptools have not; its compiled operators play no part here.
.oracle/.mmcv: $(VENV)/.python tests/runner/oracle/requirements.txt
	@echo "building mmcv 1.7.2 in .oracle ..."
	@rm -rf .oracle && mkdir .oracle && echo 'setuptools<81' > .oracle/build.txt
	@MMCV_WITH_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .oracle/mmcv \
	  --build-constraint .oracle/build.txt -r tests/runner/oracle/requirements.txt
	@touch $@
