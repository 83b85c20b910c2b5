#!/bin/sh
# apt_download.sh PACKAGE: the .deb of PACKAGE into this folder, without root. Where the package lists are missing
# (a fresh container), they are fetched into a folder of our own first.
set -eu
quick="-q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20"
# shellcheck disable=SC2086
apt-get $quick download "$1" && exit 0
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
mkdir -p "$lists/state/lists/partial" "$lists/cache/archives/partial"
own="-o Dir::State=$lists/state -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$lists/cache"
own="$own -o APT::Sandbox::User="
# shellcheck disable=SC2086
apt-get $quick $own update
# shellcheck disable=SC2086
apt-get $quick $own download "$1"
