# One door for people and CI. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Images of CI set it. Without bytecode every worker rewrites the assertions of all tests (15 s of a processor), and every
# process that a test starts compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
# cpu or gpu: which vLLM and torch are installed. The tiny example and the tests run on CPUs, also where GPUs are.
DEVICE ?= cpu
MEMBERS := processes api tasks curvefit coordinator trainer generator lifecycle autoscaling local operator analysis cli extras
BIN := $(VENV)/bin
LOCKS := requirements/$(DEVICE).txt requirements/dev.txt
BENCHMARKS := ablation adaptive_concurrency checkpoint coordinator curriculum datasets decisions draft_memory earlier_runs environments evaluation_generators evaluation_sets forecast forecast_llm fp32_logits gradient_guard grading history hostile_coordinators learning loading lora memory operator_load opgraph overlap publish retry schedule silent_coordinators simulator speculation streams verdicts
INSTALLED := $(VENV)/.installed-$(DEVICE)
IMAGE_BUILDER ?= $(if $(shell docker info >/dev/null 2>&1 && echo yes),docker,buildah)
IMAGE_PREFIX ?= scalerl-
TAG ?= dev
BASE_IMAGE ?=
# Where setup had to bring libnuma (requirements/libnuma.sh), tests that load vLLM themselves find it.
PYTEST = $(if $(wildcard $(VENV)/lib/scalerl/libnuma.so.1),LD_LIBRARY_PATH=$(abspath $(VENV)/lib/scalerl)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}) $(BIN)/python -m pytest
# Tests marked `full` run where FULL is set: `make test-full` sets it.
FULL ?=
AND_NOT_FULL = $(if $(FULL),,and not full)
DURATIONS := --durations=20
# What shares a worker, and what comes first: conftest.py. Three at a time on two cores: tests wait for processes, servers, leases and pods.
BY_FILE = --dist loadfile --no-loadscope-reorder -n $(WORKERS) $(REPEAT)
# A test that fails is run once more, and listed: conftest.py.
REPEAT := --reruns 1
WORKERS := 3
UNIT := $(MEMBERS:%=%/tests) tests/house tests/chart tests/release
AUTOSTOP := tests/cluster/test_runs.py::test_run_is_stopped_by_its_forecast
KUEUE := tests/cluster/test_kueue.py
ALONE := tests/cluster/test_event_loop.py
RUN_DIR ?=
IMAGES ?=
QUICK ?=

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(INSTALLED) ## install everything into .venv, from the locks, hashes checked; DEVICE=gpu on a machine with GPUs

$(BIN)/uv: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; set PYTHON=" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module does not work here; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

# `sync` also removes what is not in the locks: the other device's vLLM, after a change of DEVICE.
$(INSTALLED): $(BIN)/uv $(LOCKS) requirements/libnuma.txt $(MEMBERS:%=%/pyproject.toml)
	@rm -rf $(VENV)/.installed-* $(VENV)/lib/scalerl
	$(BIN)/uv pip sync -q --compile-bytecode --python $(BIN)/python --require-hashes $(LOCKS)
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation $(MEMBERS:%=-e ./%)
	$(if $(filter cpu,$(DEVICE)),requirements/libnuma.sh $(VENV))
	@touch $@

run: setup ## train the tiny model on this machine, end to end
	$(BIN)/scalerl run examples/tiny/run.yaml $(if $(RUN_DIR),--dir $(RUN_DIR))

run-autostop: setup ## a run that its own forecast stops
	$(BIN)/scalerl run examples/tiny-autostop/run.yaml $(if $(RUN_DIR),--dir $(RUN_DIR))

# What a cluster is made of is built meanwhile. Where its programs or the images' packages never were, that takes longer than lint: the
# tests that need no cluster are run first then. Images of other code take as long as the first unit tests. What has failed before lint ended
# is tried again with its output here (3: no cluster can be made); what fails later goes wrong again in the tests of clusters.
test: setup ## everything CI runs
	@$(if $(KUBECONFIG),,nice $(BIN)/python tests/cluster/cluster.py prepare > $(VENV)/prepare.log 2>&1 & built=$$!; trap "kill $$built 2> /dev/null || :" EXIT;) \
	  $(MAKE) --no-print-directory -j 2 -O lint doctests && \
	  if [ "$${built:-}" ] && kill -0 "$$built" 2> /dev/null && ! $(BIN)/python tests/cluster/cluster.py kept; then \
	    $(MAKE) --no-print-directory test-unit test-local test-cluster; \
	  elif [ "$${built:-}" ] && { kill -0 "$$built" 2> /dev/null || wait "$$built" || [ $$? -eq 3 ]; }; then \
	    $(MAKE) --no-print-directory test-tiers IMAGES_LATER=$(if $(FULL),,1); \
	  else $(MAKE) --no-print-directory test-tiers; fi

test-full: export FULL := 1
test-full: test ## those and the ones marked `full`, then the short form of every benchmark: before a release
	$(MAKE) --no-print-directory bench bench-trl QUICK=1

doctests: setup ## the examples in the members' docstrings
	@# Not by path, as tests are: the folder `operator` would become a module before the standard library's.
	$(PYTEST) -q --import-mode=prepend --doctest-modules $(MEMBERS:%=%/src)

# One worker more: that of the node's cluster waits for pods.
test-tiers: WORKERS := 4
test-tiers: setup $(if $(IMAGES_LATER),,cluster-tools) ## the three tiers below at once: tests of clusters wait three quarters of their time
	$(PYTEST) $(DURATIONS) $(BY_FILE) $(if $(FULL),,-m 'not full') $(UNIT) tests/local tests/cluster $(ALONE:%=--ignore=%)
	$(MAKE) --no-print-directory test-alone

# It measures callbacks by the wall.
test-alone: setup
	$(PYTEST) $(REPEAT) -m 'cluster $(AND_NOT_FULL)' $(ALONE)

# Exit code 3: no cluster can be made on this machine, and its tests say why they are skipped.
cluster-tools: setup
	$(if $(KUBECONFIG),,$(BIN)/python tests/cluster/cluster.py prepare || [ $$? -eq 3 ])
	$(if $(FULL),$(BIN)/python tests/cluster/cluster.py tool kueue)

test-unit: setup ## members' tests, a few with a real vLLM server
	$(PYTEST) $(DURATIONS) $(BY_FILE) -m 'not cluster $(AND_NOT_FULL)' $(UNIT)

test-local: setup ## whole runs on this machine, with faults
	$(PYTEST) $(DURATIONS) $(BY_FILE) -m 'local $(AND_NOT_FULL)' tests/local

test-cluster: setup cluster-tools ## the operator and the chart on a real Kubernetes, made here unless KUBECONFIG names one
	$(PYTEST) $(DURATIONS) $(BY_FILE) -m 'cluster $(AND_NOT_FULL)' tests/chart tests/cluster $(ALONE:%=--ignore=%)
	$(MAKE) --no-print-directory test-alone

test-autostop: setup ## a run on that Kubernetes that its own forecast stops: ten minutes
	$(if $(KUBECONFIG),,$(BIN)/python tests/cluster/cluster.py prepare)
	$(PYTEST) -s $(AUTOSTOP)

test-kueue: setup ## runs in the queues of a real Kueue, which is built here: minutes the first time
	$(BIN)/python tests/cluster/cluster.py tool kueue
	$(PYTEST) -s $(KUEUE)

test-runs: setup ## only the whole runs on that Kubernetes, with every fault, what was measured printed: half an hour
	$(if $(KUBECONFIG),,$(BIN)/python tests/cluster/cluster.py prepare)
	$(PYTEST) -s tests/cluster/test_runs.py

cluster: ## a Kubernetes on this machine, with the images in it; prints what to set in your shell
	@$(PYTHON) tests/cluster/cluster.py up --images

cluster-down: ## end that Kubernetes, with everything it made
	$(PYTHON) tests/cluster/cluster.py down

release: setup ## everything of a release into dist/VERSION; IMAGES=registry.example.com/team also pushes the images there
	$(BIN)/python release/build.py $(if $(IMAGES),--registry $(IMAGES)) $(if $(filter-out file,$(origin DEVICE)),--device $(DEVICE))

release-check: setup ## install what `make release` made where there is no checkout, and run it
	SCALERL_RELEASE=$(abspath $(firstword $(shell ls -td dist/*/ 2>/dev/null) dist)) $(PYTEST) tests/release tests/chart/test_chart_release.py

# For GPUs unless DEVICE is given. With docker, or else buildah; to push them is the builder's own command.
images: ## build the three images; IMAGE_PREFIX, TAG, DEVICE, BASE_IMAGE
	@command -v $(IMAGE_BUILDER) >/dev/null || { echo "neither docker nor buildah is here; install one" >&2; exit 2; }
	for role in operator trainer generator; do BUILDAH_LAYERS=true $(IMAGE_BUILDER) build -f Dockerfile.$$role \
	  $(if $(filter-out file,$(origin DEVICE)),--build-arg DEVICE=$(DEVICE)) $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
	  -t $(IMAGE_PREFIX)$$role:$(TAG) .; done

lint: setup ## format, lint, types, import contracts, links of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@# A link that leads nowhere fails. Not -q: it also hides the warnings that fail the build.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -d $(VENV)/site

format: setup ## rewrite the code the way lint wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## every benchmark but bench-trl and bench-rollout; QUICK=1 for a minute each
	failed=; for b in $(BENCHMARKS); do $(BIN)/python benchmarks/$$b.py $(if $(QUICK),--quick) || failed="$$failed $$b"; done; \
	  [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

bench-trl: setup ## the comparison with TRL, which it installs beside
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements/bench.txt
	$(BIN)/python benchmarks/against_trl.py $(if $(QUICK),--quick)
	$(BIN)/python benchmarks/train_step.py --trl $(if $(QUICK),--quick,--rounds 1)

bench-rollout: setup ## drafts from past responses beside vLLM's suffix decoding, of which it builds a part (C++ compiler)
	benchmarks/support/build_suffix.sh $(VENV) $(VENV)/suffix
	$(BIN)/python benchmarks/rollout.py --arctic $(VENV)/suffix $(if $(QUICK),--quick)

# On whatever python is here: it needs torch and transformers, and none of this project's own installation.
gpu-check: ## what runs on this machine's GPU, how exactly and how fast (at most ten minutes); GPU_CHECK="--only head"
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) benchmarks/gpu_check.py $(GPU_CHECK)

crds: setup ## write crds/ again from the models in api, and the chart's copy
	$(BIN)/python -m scalerl_api.crd crds
	cp crds/*.yaml charts/scalerl/files/crds/

dashboards: setup ## write the chart's Grafana dashboards again
	$(BIN)/python charts/dashboards

docs: setup ## write what the pages take from the code, and the site into build/site
	$(BIN)/python docs/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lock: $(BIN)/uv ## write requirements/*.txt again from the members' pyproject files
	UV=$(BIN)/uv requirements/compile.sh

clean: ## remove the environment and all runs
	rm -rf $(VENV) runs

.PHONY: help setup run run-autostop test test-full doctests test-tiers test-alone cluster-tools test-unit test-local test-cluster test-autostop test-kueue test-runs cluster cluster-down release release-check images lint format bench bench-trl bench-rollout gpu-check crds dashboards docs lock clean
