#!/bin/sh
# Installs the Debian packages that a make target needs, only those that are missing. When nothing is missing this is a
# handful of look-ups in PATH: no network, no root.
#
#   scripts/install.sh build|demo|test
#
# Services of the installed packages are not started: the tests run etcd and containerd themselves, in namespaces.
set -eu

want=${1:?which set: build, demo or test}

# package:what proves that it is there (a program, or a path)
build='protobuf-compiler:protoc libprotobuf-dev:/usr/include/google/protobuf/descriptor.proto gcc:cc libc6-dev:/usr/include/stdio.h'
demo="$build iproute2:ip iptables:iptables nftables:nft iputils-ping:ping traceroute:traceroute tcpdump:tcpdump
 ethtool:ethtool kmod:modprobe procps:ps util-linux:nsenter"
test="$demo etcd-server:etcd etcd-client:etcdctl iperf3:iperf3 conntrack:conntrack strace:strace g++:c++ openssl:openssl
 containernetworking-plugins:/usr/lib/cni/bridge containerd:containerd runc:runc busybox-static:/bin/busybox
 qemu-system-x86:qemu-system-x86_64"

case $want in
build) set=$build ;;
demo) set=$demo ;;
test | bench) set=$test ;;
*) echo "scripts/install.sh: unknown set $want" >&2; exit 2 ;;
esac

PATH=$PATH:/usr/sbin:/sbin
export PATH
missing=
for pair in $set; do
    package=${pair%%:*} proof=${pair#*:}
    case $proof in
    /*) [ -e "$proof" ] || missing="$missing $package" ;;
    *) command -v "$proof" >/dev/null 2>&1 || missing="$missing $package" ;;
    esac
done

if ! command -v cargo >/dev/null 2>&1; then
    echo "felt: cargo is missing: install Rust 1.89 or newer (https://rustup.rs)" >&2
    exit 1
fi
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "felt: missing:$missing (Debian's package names; this machine has no apt-get, install them by hand)" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "felt: root is needed to install:$missing (run as root, or: apt-get install --no-install-recommends$missing)" >&2
    exit 1
fi

echo "felt: installing$missing"
# Debian's switch for "install, but start no service" (policy-rc.d(8)); taken away again at the end.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# The package lists may be absent (fresh image) or too old: try without fetching them first, it is faster.
if ! apt-get install -y -q --no-install-recommends $missing >"$log" 2>&1; then
    if ! { apt-get update -q && apt-get install -y -q --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        echo "felt: could not install:$missing" >&2
        exit 1
    fi
fi
rm -f "$log"
