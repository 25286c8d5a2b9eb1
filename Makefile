# The repository's commands. `make help` lists them; each says in one line what is missing when something is.

CARGO ?= cargo
# One profile for everything: nothing is compiled twice.
FLAGS := --release --workspace

.DEFAULT_GOAL := help
.PHONY: help build demo test test-kube test-reference bench fmt lint unit lab doc fuzz clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

build: ## release binaries in target/release/
	@scripts/install.sh build
	$(CARGO) build $(FLAGS)

demo: ## three nodes, pods that reach each other, in under a minute after the build (root)
	@scripts/install.sh demo
	@$(CARGO) build --release -q -p felt-control -p felt-cni -p felt-netns-tests --bins
	@target/release/felt-lab demo $(DEMO_FLAGS)

test: ## format, lints, licences, unit, namespace, registry and plugin tests (root)
	@scripts/install.sh test
	@scripts/test.sh

test-kube: ## the Kubernetes registry against a real kube-apiserver, where one is or can be built
	@scripts/install.sh test
	@scripts/test-kube.sh

test-reference: ## the plugins beside the reference's release 1.9.1, built with a Go toolchain (root)
	@scripts/install.sh test
	@scripts/test-reference.sh

test-long: ## ten million hostile datagrams instead of one (root, minutes)
	@scripts/install.sh test
	$(CARGO) build $(FLAGS) --bins
	FELT_HOSTILE=5000000 $(CARGO) test --release -p felt-netns-tests --test hostile

bench: ## criterion benches and felt-lab bench; tables and plots in target/bench/ (root)
	@scripts/install.sh bench
	@scripts/bench.sh

fmt: ## format the sources
	$(CARGO) fmt --all

lint: ## clippy, warnings denied
	$(CARGO) clippy $(FLAGS) --all-targets -- -D warnings

unit: ## the tests that need no root
	$(CARGO) test $(FLAGS) --exclude felt-netns-tests

lab: ## the namespace tests alone (root)
	@scripts/install.sh test
	$(CARGO) build $(FLAGS) --bins
	$(CARGO) test --release -p felt-netns-tests

doc: ## the crates' documentation, warnings denied
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(FLAGS) --no-deps

fuzz: ## the fuzz targets, ten minutes each
	dataplane/fuzz/run.sh 600

clean: ## remove target/
	$(CARGO) clean
