#!/bin/sh
# Installs what the browser tests need and pip cannot bring: Chromium, from Debian's packages.
#
# Where it cannot be installed (not root, no apt) the browser tests skip and say why. In CI
# (CI=true) that is a failure: a skipped test must not look like a passed one.
set -eu

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done

give_up() {
    echo "Chromium is missing: $1. Browser tests will be skipped; to run them, install chromium." >&2
    if [ "${CI:-}" = "true" ]; then
        exit 1
    fi
    exit 0
}

command -v apt-get >/dev/null 2>&1 || give_up "this system has no apt-get"
as_root=""
if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo -n env DEBIAN_FRONTEND=noninteractive"
    else
        give_up "installing it needs root"
    fi
fi

echo "installing chromium with apt-get"
export DEBIAN_FRONTEND=noninteractive
# Another package manager may be at work; wait for its lock instead of failing.
lock="-o DPkg::Lock::Timeout=300"
# shellcheck disable=SC2086
$as_root apt-get update -q $lock >/dev/null || give_up "apt-get update failed"
# shellcheck disable=SC2086
$as_root apt-get install -y -q --no-install-recommends $lock chromium >/dev/null \
    || give_up "apt-get install failed"
