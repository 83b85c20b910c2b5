#!/bin/sh
# Makes the environment of one framework, for `make test-frameworks`: setup_frameworks.sh NAME
#
#   tensorflow   TensorFlow and Keras, without torch
#   jax          JAX, optax, flax and Keras, without torch
#   mixed        torch, JAX, optax, Keras and scikit-learn: jobs whose workers use different frameworks
#   lowest-tensorflow, lowest-jax   the lowest versions that the adapters take (constraints-lowest.txt)
#
# It is .venv-NAME in the repository, or NAME in the folder that $SYNCLINE_ENVIRONMENTS names. syncline itself is
# installed there, editable. When nothing changed since the last time, nothing is done.
set -eu
cd "$(dirname "$0")/.."

NAME=test-frameworks
which=${1:-}
constraints=constraints-frameworks.txt
case $which in
tensorflow) frameworks="tensorflow keras" ;;
jax) frameworks="jax jaxlib optax flax keras" ;;
mixed) frameworks="torch jax jaxlib optax keras scikit-learn" ;;
lowest-tensorflow) frameworks="tensorflow keras" constraints=constraints-lowest.txt ;;
lowest-jax) frameworks="jax jaxlib optax keras" constraints=constraints-lowest.txt ;;
*)
    echo "$NAME: name one of tensorflow, jax, mixed, lowest-tensorflow, lowest-jax" >&2
    exit 2
    ;;
esac

if [ -n "${SYNCLINE_ENVIRONMENTS:-}" ]; then
    VENV=$SYNCLINE_ENVIRONMENTS/$which
else
    VENV=.venv-$which
fi
STAMP=$VENV/.setup
. tools/venv.sh

wanted() {
    pwd
    echo "$frameworks"
    cat tools/setup_frameworks.sh pyproject.toml "$constraints"
}

install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c "$constraints" "$@"; }

up_to_date && exit 0
ensure_venv
# The old stamp goes first, so that an install that was cut short is repeated.
rm -f "$STAMP"
say "installing $frameworks into $VENV"
# The build backend is installed too: with it, a later repeat that finds everything in place needs no download.
install hatchling editables pytest pytest-timeout pytest-xdist hypothesis
# shellcheck disable=SC2086  # several words
install --no-build-isolation -e '.[serve]' $frameworks
wanted >"$STAMP"
say "$which is ready"
