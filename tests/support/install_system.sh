#!/bin/sh
# Installs what the tests need and pip cannot bring, from Debian's packages: Chromium for the browser
# tests, a C compiler for the compiled kernels, node and npm for the stock JavaScript client, promtool
# for the alerts.
#
# Where something cannot be installed (not root, no apt), the tests that need it skip and say why. In
# CI (CI=true) that is a failure: a skipped test must not look like a passed one.
set -eu

downloads="${PARLEY_TEST_CACHE:-$HOME/.cache/parley-tests}"  # as in tests/support/server_env.py
packages=""
names=""

has() {
    for command in "$@"; do
        if command -v "$command" >/dev/null 2>&1; then
            return 0
        fi
    done
    return 1
}

has chromium chromium-browser google-chrome || { packages="$packages chromium"; names="$names Chromium"; }
has cc gcc clang || { packages="$packages gcc libc6-dev"; names="$names cc"; }
has node || { packages="$packages nodejs"; names="$names node"; }
has npm || { packages="$packages npm"; names="$names npm"; }
needs_promtool=""
has promtool || [ -x "$downloads/promtool" ] || { needs_promtool=yes; names="$names promtool"; }

if [ -z "$names" ]; then
    exit 0
fi

give_up() {
    echo "Missing:$names. $1. The tests that need them will be skipped." >&2
    if [ "${CI:-}" = "true" ]; then
        exit 1
    fi
    exit 0
}

has apt-get || give_up "This system has no apt-get"
as_root=""
if [ "$(id -u)" != 0 ]; then
    if has sudo && sudo -n true 2>/dev/null; then
        as_root="sudo -n env DEBIAN_FRONTEND=noninteractive"
    else
        give_up "Installing them needs root"
    fi
fi

echo "installing with apt-get:$names"
export DEBIAN_FRONTEND=noninteractive
# Another package manager may be at work; wait for its lock instead of failing.
lock="-o DPkg::Lock::Timeout=300"
# shellcheck disable=SC2086
$as_root apt-get update -q $lock >/dev/null || give_up "apt-get update failed"
if [ -n "$packages" ]; then
    # shellcheck disable=SC2086
    $as_root apt-get install -y -q --no-install-recommends $lock $packages >/dev/null \
        || give_up "apt-get install failed"
fi
if [ -n "$needs_promtool" ]; then
    # Only the one program: the package would start a server.
    mkdir -p "$downloads"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    (
        cd "$work"
        apt-get download -q prometheus >/dev/null 2>&1
        dpkg-deb --extract prometheus_*.deb tree
        mv tree/usr/bin/promtool "$downloads/promtool"
    ) || give_up "promtool could not be taken out of Debian's package prometheus"
fi
