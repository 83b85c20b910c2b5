#!/bin/sh
# Runs tests/frameworks in the environments named: test_frameworks.sh "tensorflow jax mixed" [arguments of pytest]
# Called by `make test-frameworks`. It goes on after a failure, and ends with 1 if an environment had one.
set -eu
cd "$(dirname "$0")/.."

names=$1
shift

for name in $names; do # first all environments: what cannot be downloaded is known before a long run
    sh tools/setup_frameworks.sh "$name"
done

failed=""
for name in $names; do
    case $name in # Keras' tests run on the backend of each environment
    tensorflow | lowest-tensorflow) backend=tensorflow parts="keras tensorflow" ;;
    jax | lowest-jax) backend=jax parts="keras jax" ;;
    mixed) backend=torch parts="keras mixed" ;;
    esac
    paths="tests/frameworks/test_smoke.py tests/frameworks/test_pages.py"
    for part in $parts; do
        [ ! -d "tests/frameworks/$part" ] || paths="$paths tests/frameworks/$part"
    done
    venv=.venv-$name
    [ -z "${SYNCLINE_ENVIRONMENTS:-}" ] || venv=$SYNCLINE_ENVIRONMENTS/$name
    echo "test-frameworks: $name: $paths" >&2
    code=0
    # Two at a time, as there are two cores at least; most tests wait for processes that start.
    # shellcheck disable=SC2086  # several words
    KERAS_BACKEND=$backend "$venv/bin/python" -m pytest -q -n "${JOBS:-2}" --dist worksteal $paths "$@" || code=$?
    case $code in
    0 | 5) ;; # 5: nothing here was selected by the arguments
    130) exit 130 ;;
    *) failed="$failed $name" ;;
    esac
done

[ -z "$failed" ] || {
    echo "test-frameworks: failed in:$failed" >&2
    exit 1
}
