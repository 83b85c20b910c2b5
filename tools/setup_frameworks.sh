#!/bin/sh
# Makes the environment of one framework, for `make test-frameworks`: setup_frameworks.sh tensorflow|jax|mixed
#
#   tensorflow   TensorFlow and Keras, without torch
#   jax          JAX, optax, flax and Keras, without torch
#   mixed        torch, JAX, optax, Keras and scikit-learn: jobs whose workers use different frameworks
#
# It is .venv-NAME in the repository, or NAME in the folder that $SYNCLINE_ENVIRONMENTS names. syncline itself is
# installed there, editable. When nothing changed since the last time, nothing is done.
set -eu
cd "$(dirname "$0")/.."

NAME=test-frameworks
which=${1:-}
case $which in
tensorflow) frameworks="tensorflow keras" ;;
jax) frameworks="jax jaxlib optax flax keras" ;;
mixed) frameworks="torch jax jaxlib optax keras scikit-learn" ;;
*)
    echo "$NAME: name one of tensorflow, jax, mixed" >&2
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
    cat tools/setup_frameworks.sh pyproject.toml constraints-frameworks.txt
}

install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c constraints-frameworks.txt "$@"; }

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
