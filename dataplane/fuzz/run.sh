#!/bin/bash
# Fuzz the data plane's parsers for a while: run.sh [SECONDS [TARGET..]]
#
# Each target starts from the golden packets of ../testdata and runs SECONDS, by default 3. A crash ends the script with
# an error and leaves the input in artifacts/TARGET/. Works on the stable toolchain, without sanitizers:
# by cargo-fuzz where it is installed, else by a plain build with the same flags.
set -eu

cd "$(dirname "$0")"
seconds=${1:-3}
shift $(($# > 0))
all=$(ls fuzz_targets | sed 's/\.rs$//')
targets=${*:-$all}
# Beside the other builds, but a build of its own: the flags differ.
export CARGO_TARGET_DIR="$PWD/../../target/fuzz"
corpus=$CARGO_TARGET_DIR/corpus

# The seeds: whole datagrams, and the inner packets and transport headers in them; and of whole datagrams and
# inner packets, batches of two as the targets `inbound` and `outbound` want them.
mkdir -p "$corpus/seeds"
write() { # NAME HEX
    # shellcheck disable=SC2059 # the format is the data: escapes
    printf "$(sed 's/../\\x&/g' <<< "$2")" > "$corpus/seeds/$1"
}
for file in ../testdata/*/*.hex; do
    name=$(basename "$(dirname "$file")")-$(basename "$file" .hex)
    digits=$(grep -v '^#' "$file" | tr -d ' \n')
    for skip in 0 22 42 62; do
        rest=${digits:$((skip * 2))}
        [ -n "$rest" ] || continue
        write "$name-$skip" "$rest"
        [ "$skip" -le 22 ] || continue
        for head in "" 00000000000000000000; do
            piece=$head$rest
            len=$((${#piece} / 2))
            piece=$(printf '%02x%02x0400' $((len % 256)) $((len / 256)))$piece
            # The first byte chooses vxlan or udp, and whether sends are merged.
            write "$name-$skip-batch$head" "$(printf '%02x' $((skip == 22 ? 3 : 1)))$piece$piece"
        done
    done
done

if cargo fuzz --version > /dev/null 2>&1; then
    run() { cargo fuzz run -s none --fuzz-dir . "$1" "$corpus/$1" "$corpus/seeds" -- -max_total_time="$seconds" -max_len=4096 -print_final_stats=1; }
else
    # What `cargo fuzz build -s none` passes: coverage counters for libFuzzer, and debug assertions.
    RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
        -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1"
    RUSTFLAGS=$(echo $RUSTFLAGS)
    export RUSTFLAGS
    # A --target keeps the flags off build scripts.
    host=$(rustc -vV | sed -n 's/^host: //p')
    cargo build --release --bins --target "$host"
    run() {
        mkdir -p "artifacts/$1"
        "$CARGO_TARGET_DIR/$host/release/$1" "$corpus/$1" "$corpus/seeds" -artifact_prefix="artifacts/$1/" \
            -max_total_time="$seconds" -max_len=4096 -print_final_stats=1
    }
fi

for target in $targets; do
    mkdir -p "$corpus/$target"
    log=$(mktemp)
    if ! run "$target" > "$log" 2>&1; then
        tail -n 40 "$log"
        rm -f "$log"
        echo "fuzz target $target failed; its input is in dataplane/fuzz/artifacts/$target/" >&2
        exit 1
    fi
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    rm -f "$log"
    echo "$target: ${runs:-?} runs in $seconds s, nothing found"
done
