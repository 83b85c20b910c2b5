#!/bin/sh
# Makes .venv-serve-peers for the rows `serve-*` of `python -m benchmarks`: LitServe and Ray Serve, with torch. When nothing
# changed since the last time, nothing is done.
set -eu
cd "$(dirname "$0")/.."

NAME=bench
VENV=.venv-serve-peers
STAMP=$VENV/.setup
. tools/venv.sh

peers="litserve==0.2.* ray[serve]==2.*"

wanted() {
    pwd
    echo "$peers"
    cat tools/setup_serve_peers.sh constraints.txt
}

up_to_date && exit 0
ensure_venv
rm -f "$STAMP"
say "installing $peers into $VENV"
# shellcheck disable=SC2086  # several words
"$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt torch numpy uvloop $peers
wanted >"$STAMP"
say "LitServe and Ray Serve are ready"
