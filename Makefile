# Each target does all its own set-up on a Debian machine with the Rust toolchain.
.PHONY: demo test test-long test-vm check check-aarch64 build optimized fuzz bench goals conformance install compiler

demo: compiler ## build, then a guided tour with real timings
	cargo run --release --quiet --bin towline -- demo

test: compiler ## what has to pass: style, unit, property, integration and fault tests
	sh tests/run

test-long: compiler ## most of an hour: many more random sequences, cuts and foreign suites, a minute of fuzzing for each decoder; TOWLINE_LONG=10: ten times as many
	sh tests/run long

test-vm: ## disks in virtual machines: attached, striped, booted from; see tests/vm/run
	sh tests/vm/run

check-aarch64: ## on ARM processors, in emulated machines; see tests/aarch64/run; needs root, for apt
	sh tests/aarch64/run

conformance: ## pjdfstest and fsx on a remote directory under `towline run`; needs root
	sh tests/conformance

build: compiler
	cargo build --release

optimized: compiler ## target/optimized/towline: built for the loads that benches/optimize runs; ten minutes
	sh benches/optimize

check: ## style only
	cargo fmt --all --check
	rustfmt --check --edition 2024 crates/cli/launch/main.rs
	cargo clippy --workspace --all-targets -- -D warnings

fuzz: ## a minute for each decoder
	sh fuzz/run 60

bench: build ## the limits of this machine
	./target/release/towline bench limits

goals: optimized ## every goal beside its limit, and (HARNESS=.../peers.py) beside peers; needs Python and two processors
	python3 benches/goals.py --towline target/optimized/towline $(if $(HARNESS),--harness $(HARNESS))

install: $(if $(OPTIMIZED),optimized,build) ## to PREFIX (default /usr/local); OPTIMIZED=1: the optimized program
	install -D target/$(if $(OPTIMIZED),optimized,release)/towline $(or $(PREFIX),/usr/local)/bin/towline
	for page in man/*.[1-8]; do \
	    install -D -m 644 $$page $(or $(PREFIX),/usr/local)/share/man/man$${page##*.}/$${page##*/} || exit 1; \
	done

compiler: # rustc calls cc to link
	@command -v cc >/dev/null || { apt-get update -qq && apt-get install -y -qq gcc libc6-dev; }
