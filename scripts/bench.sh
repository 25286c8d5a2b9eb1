#!/bin/bash
# `make bench`: criterion's benches, then the end-to-end figures; everything lands in target/bench/.
set -eu
cd "$(dirname "$0")/.."
mkdir -p target/bench
cargo build --release --workspace --bins
cargo bench --workspace --benches 2>&1 | tee target/bench/criterion.txt
target/release/felt-lab bench --json target/bench/bench.json --plots target/bench
