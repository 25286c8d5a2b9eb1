#!/bin/bash
# felt beside the reference plugins' release 1.9.1, live: builds that release as a Go module and runs
# cni/tests/reference.rs against it. FELT_RECORD=1 also writes what `make test` compares with where there is no Go
# toolchain (cni/testdata/reference/).
set -eu
cd "$(dirname "$0")/.."

command -v go >/dev/null || {
    echo "felt: no Go toolchain: \`make test\` compares with the recorded results instead (apt-get install golang-go, 1.24 or newer)" >&2
    exit 1
}
out=$PWD/target/reference
mkdir -p "$out"
cp cni/tests/reference/go.mod cni/tests/reference/go.sum "$out/"
echo "building the reference plugins (a minute or two the first time)"
(cd "$out" && GOFLAGS=-mod=mod CGO_ENABLED=0 go build -o "$out/bin/" github.com/containernetworking/plugins/plugins/...)
FELT_REFERENCE=$out/bin cargo test --release -p felt-cni --test reference -- --include-ignored "$@"
