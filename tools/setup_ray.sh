#!/bin/sh
# Makes .venv-ray for the tests on Ray of `make test-engines`: Ray and syncline, editable, without torch. When nothing
# changed since the last time, nothing is done.
set -eu
cd "$(dirname "$0")/.."

NAME=test-engines
VENV=.venv-ray
STAMP=$VENV/.setup
. tools/venv.sh

# The dashboard of ray[default] takes submitted jobs; ray[data] is a source of samples; ray[serve] serves an example.
# RAY_VERSION tries another version.
ray="ray[data,default,serve]==${RAY_VERSION:-2.60.0}"

wanted() {
    pwd
    echo "$ray"
    cat tools/setup_ray.sh pyproject.toml
}

install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

up_to_date && exit 0
ensure_venv
rm -f "$STAMP"
say "installing $ray into $VENV"
install hatchling editables
install --no-build-isolation -e . "$ray"
wanted >"$STAMP"
say "Ray is ready"
