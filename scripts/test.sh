#!/bin/bash
# Everything `make test` checks, stage by stage. A failing stage does not stop the later ones; the end lists what failed
# and adds up the test runner's own summaries: "N passed, N failed, N skipped".
#
#   scripts/test.sh [STAGE ...]     only these stages (names as printed)
#
# A stage whose needs cannot be met is skipped with its reason, and its tests count as skipped, never as passed.
set -u
cd "$(dirname "$0")/.." || exit 1

export CARGO_TERM_COLOR=never RUST_BACKTRACE=1
out=target/test
mkdir -p $out
: >$out/all.log
only=" $* "
failed_stages=() skipped=0 broken=0 begun=$SECONDS

if [ "$(id -u)" != 0 ]; then
    echo "felt: the namespace tests need root: run \`make test\` as root" >&2
    exit 1
fi
if [ ! -c /dev/net/tun ]; then
    echo "felt: /dev/net/tun is missing (load the tun module, or pass the device into the container)" >&2
    exit 1
fi

wanted() { [ "$only" = "  " ] || [[ $only == *" $1 "* ]]; }

# stage NAME COMMAND...: runs it, keeps its output, prints it whole when it fails and its summary lines when it does not.
stage() {
    local name=$1 log=$out/$1.log from=$SECONDS code
    shift
    wanted "$name" || return 0
    printf '== %-12s ' "$name"
    "$@" >"$log" 2>&1
    code=$?
    cat "$log" >>$out/all.log
    if [ $code = 0 ]; then
        echo "ok ($((SECONDS - from)) s)"
        grep '^test result:' "$log" | grep -v ' 0 passed; 0 failed; 0 ignored'
    else
        echo "FAILED ($((SECONDS - from)) s), exit code $code"
        # Test runs are long: the failures and what they said are enough; the whole log stays in the file.
        if grep -q '^test result: FAILED' "$log"; then
            sed -n '/^failures:$/,/^test result/p' "$log" | tail -n 200
        else
            tail -n 60 "$log"
            broken=$((broken + 1))
        fi
        echo "   whole output: $log"
        failed_stages+=("$name")
    fi
}

# skip NAME COUNT REASON: tests that cannot run here.
skip() {
    wanted "$1" || return 0
    printf '== %-12s SKIPPED %s tests: %s\n' "$1" "$2" "$3"
    skipped=$((skipped + $2))
}

# Number of tests in a test target.
count_tests() { cargo test --release -q -p "$1" --test "$2" -- --list 2>/dev/null | grep -c ': test$'; }

component() { # cargo sub-command, rustup component
    cargo "$1" --version >/dev/null 2>&1 || rustup component add "$2" >/dev/null 2>&1
}

loom() {
    # loom replaces the atomics of the whole crate: a build of its own, kept apart so that it disturbs no other.
    CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" cargo test --release -p felt-dataplane --test 'loom_*'
}

docs() { RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps --quiet; }

lint_scripts() { local s; for s in scripts/*.sh .ci/run; do bash -n "$s" || return 1; done; }

if component fmt rustfmt; then stage format cargo fmt --all --check; else skip format 1 "rustfmt is not installed and cannot be added"; fi
stage scripts lint_scripts
stage build cargo build --release --workspace --bins
if component clippy clippy; then
    stage lints cargo clippy --release --workspace --all-targets --quiet -- -D warnings
else
    skip lints 1 "clippy is not installed and cannot be added"
fi
stage docs docs
# Ignored tests are those that need root, which is there.
stage unit cargo test --release --workspace --exclude felt-netns-tests --no-fail-fast
# Tests of the packet loop over a real TUN device need root, so a plain `cargo test` leaves them out.
stage device cargo test --release -p felt-dataplane --test device -- --ignored
stage loom loom
if [ -x dataplane/fuzz/run.sh ]; then stage fuzz dataplane/fuzz/run.sh; fi

# Namespace tests: side by side within each file (labs share nothing), the ones that measure time alone afterwards.
serial="timing"
vm="vm"
parallel=()
for file in netns-tests/tests/*.rs; do
    name=$(basename "$file" .rs)
    [[ " $serial $vm " == *" $name "* ]] || parallel+=(--test "$name")
done
stage namespaces env RUST_TEST_THREADS=4 cargo test --release -p felt-netns-tests --lib --bins "${parallel[@]}" --no-fail-fast
for name in $serial; do
    [ -e "netns-tests/tests/$name.rs" ] || continue
    stage "$name" env RUST_TEST_THREADS=1 cargo test --release -p felt-netns-tests --test "$name" --no-fail-fast
done
if [ -e netns-tests/tests/vm.rs ] && wanted vm; then
    if reason=$(target/release/felt-lab vm --prepare 2>&1 >/dev/null); then
        stage vm env RUST_TEST_THREADS=1 cargo test --release -p felt-netns-tests --test vm --no-fail-fast
    else
        skip vm "$(count_tests felt-netns-tests vm)" "${reason#felt-lab: }"
    fi
fi

sum() { grep '^test result:' $out/all.log | sed -n "s/.* \([0-9]*\) $1.*/\1/p" | awk '{ n += $1 } END { print n + 0 }'; }
# Tests a run left out (their reason stands in the line), unless another stage ran them.
left_out=$(awk '$1 == "test" && / \.\.\. ignored/ { out[$2] = $0 } $1 == "test" && / \.\.\. (ok|FAILED)$/ { ran[$2] }
    END { for (t in out) if (!(t in ran)) print out[t] }' $out/all.log | sed 's/^test \(.*\) \.\.\. ignored,* */   skipped \1: /' | sort)
ignored=$(printf '%s' "$left_out" | grep -c .)
passed=$(sum passed) failed=$(($(sum failed) + broken))
echo "== summary ($((SECONDS - begun)) s)"
grep '^test result:' $out/all.log | sort | uniq -c | sort -rn | awk '$5 != 0 || $7 != 0' | sed 's/^ *[0-9]* //' | cut -c1-100 | tail -n 40
[ -z "$left_out" ] || printf '%s\n' "$left_out"
[ ${#failed_stages[@]} = 0 ] || echo "failed stages: ${failed_stages[*]}"
echo "$passed passed, $failed failed, $((skipped + ignored)) skipped"
[ ${#failed_stages[@]} = 0 ] && [ "$failed" = 0 ]
