# Everything from a bare checkout with Python 3.11 or newer. `make` alone lists the targets.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
READY := $(VENV)/.ready
IN_VENV := $(VENV)/bin/python -m
# Three processes for two cores, as tests wait for a third of their time, mostly for a daemon. One file's tests
# stay in one of them; the longest files come first.
PYTEST := pytest -n 3 --dist loadfile --no-loadscope-reorder
# Parts of the nightly tests, by default all of them: see .ci/nightly.py.
PART :=
LOWEST := .venv-lowest
NEWEST := .venv-newest
# What these tests of both ends use together is every dependency, as the queue, the gateway, the engine and the
# trainers use it. The other fast tests pass there too, but there is no time for all of them three times.
ENDS_TESTS := compute configs cli/test_commands.py codegraph/test_encoder.py dpo/test_task.py engine/test_detokenizer.py \
	engine/test_json_schemas.py engine/test_vision.py environments/test_images.py gateway/test_answers.py \
	gateway/test_daemon.py gateway/test_disconnects.py gateway/test_refusals.py grpo/test_grpo.py grpo/test_task.py \
	infer/test_infer.py mlm/test_corpus.py models/test_adapters.py project/test_versions.py queue/test_jobs.py \
	queue/test_stream.py runs/test_checkpoints.py runs/test_saving.py sft/test_task.py store/test_run_store.py \
	supervise/test_redis_server.py training/test_trainer.py

# Without bytecode every process of a test compiles what it imports, a daemon's for a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test test-slow test-all test-nightly test-lowest test-newest lint bench check clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 \t/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(READY) ## set up .venv with the pinned versions (again only when they change)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "warmd needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON); torch is large, the first time takes minutes ..."
	@$(PYTHON) -m venv $(VENV)
	@$(IN_VENV) pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(IN_VENV) compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true # on all processors; not all is for this Python
	@touch $@
	@echo "$(VENV) is ready."

demo: venv ## train the demo model with GRPO, compare its answers before and after
	@tests/demo.sh $(CURDIR)/$(VENV)/bin

test: venv ## the default tests
	@$(IN_VENV) $(PYTEST) -m "not slow and not gpu"

test-slow: venv ## the tests that take longer
	@$(IN_VENV) $(PYTEST) -m "slow and not nightly and not gpu"

test-all: venv ## both in one run, as CI does: they share collection and daemons
	@$(IN_VENV) $(PYTEST) -m "not nightly and not gpu"

test-nightly: venv ## what takes minutes; PART=storms: one part; .ci/nightly.py --list: all parts
	@$(VENV)/bin/python .ci/nightly.py $(PART)

test-lowest: $(LOWEST)/.ready ## tests of every dependency, in the lowest versions that are allowed
	@$(LOWEST)/bin/python -m $(PYTEST) -m "not slow and not gpu" $(ENDS_TESTS:%=tests/%)

test-newest: $(READY) ## the same tests in the newest versions of today, with torch as in constraints.txt
	$(call new_venv,$(NEWEST))
	@grep '^torch==' constraints.txt >$(NEWEST)/torch.txt
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c $(NEWEST)/torch.txt -e '.[dev]'
	@$(NEWEST)/bin/python -m $(PYTEST) -m "not slow and not gpu" $(ENDS_TESTS:%=tests/%)

$(LOWEST)/.ready: $(READY) .ci/constraints-lowest.txt
	$(call new_venv,$(LOWEST))
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c .ci/constraints-lowest.txt -e '.[dev]'
	@touch $@

# An environment with the torch of .venv, which is most of what would be installed.
define new_venv
	@$(PYTHON) -m venv --clear $(1)
	@cp -al $(foreach part,torch torch-* torchgen functorch,$(VENV)/lib/python3*/site-packages/$(part)) \
		$(1)/lib/python3*/site-packages
endef

lint: venv ## format, lint and types
	@$(IN_VENV) ruff format --check
	@$(IN_VENV) ruff check
	@$(IN_VENV) mypy

bench: venv ## training and answering compared with the stock libraries and the lower bound: 43 minutes on two idle cores
	@$(VENV)/bin/warmd bench grpo
	@$(VENV)/bin/warmd bench mlm
	@$(VENV)/bin/warmd bench infer

check: lint test ## what must pass before a commit

clean: ## remove .venv and everything else that was made
	@rm -rf $(VENV) $(LOWEST) $(NEWEST) build dist .demo .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
