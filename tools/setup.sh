#!/bin/sh
# Makes .venv with syncline (editable) and what its tests and its site need. Called by `make setup`.
#
# .venv/.setup holds what the environment was made from: the place and the two files below, whole. When that is
# still so, nothing is done, and this costs some milliseconds.
set -eu
cd "$(dirname "$0")/.."

NAME=setup
VENV=.venv
STAMP=$VENV/.setup
. tools/venv.sh

wanted() {
    pwd
    cat pyproject.toml constraints.txt
}

up_to_date && exit 0
ensure_venv
# The old stamp goes first, so that an install that was cut short is repeated.
rm -f "$STAMP"
say "installing syncline and the tools of its tests (torch is the large one)"
"$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
wanted >"$STAMP"
say "ready"
