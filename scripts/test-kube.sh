#!/bin/bash
# The Kubernetes registry against a real kube-apiserver and etcd. The program comes from $KUBE_APISERVER, from
# $KUBEBUILDER_ASSETS, or is built once by the Go toolchain where there is one; else the tests are skipped, and it says so.
set -eu
cd "$(dirname "$0")/.."

program=${KUBE_APISERVER:-}
[ -n "$program" ] || [ ! -x "${KUBEBUILDER_ASSETS:-}/kube-apiserver" ] || program=$KUBEBUILDER_ASSETS/kube-apiserver
if [ -z "$program" ]; then
    PATH=$PATH:/usr/local/go/bin
    if ! command -v go >/dev/null; then
        echo "test-kube: SKIPPED 2 tests: no kube-apiserver (set KUBEBUILDER_ASSETS, or install Go to build one)"
        exit 0
    fi
    program=$PWD/target/kube/kube-apiserver
    if [ ! -x "$program" ]; then
        echo "test-kube: building kube-apiserver once, which takes some minutes"
        mkdir -p target/kube
        (cd control/tests/apiserver &&
            version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes) &&
            go build -trimpath -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" \
                -o "$program.new" k8s.io/kubernetes/cmd/kube-apiserver)
        mv "$program.new" "$program"
    fi
fi
echo "test-kube: $("$program" --version)"
KUBE_APISERVER=$program cargo test --release -p felt-control --test kube_apiserver -- --ignored
