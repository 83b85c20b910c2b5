#!/bin/sh
# Runs tests/engines: jobs that Open MPI, MPICH's Hydra, torchrun, Slurm and Ray start, and manifests for Kubernetes.
# Called by `make test-engines`, with arguments of pytest. As root on Debian it installs the engines that are missing;
# what is still missing is skipped, with the reason. Slurm's own services are not started: the tests start daemons of
# their own.
set -eu
cd "$(dirname "$0")/.."

missing=""
command -v mpirun.openmpi >/dev/null || missing="$missing openmpi-bin"
command -v mpiexec.hydra >/dev/null || missing="$missing mpich"
PATH="$PATH:/usr/sbin"
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null ||
    missing="$missing slurm-wlm"
command -v munged >/dev/null || missing="$missing munge"
if [ -n "$missing" ]; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        # shellcheck disable=SC2086  # several words
        { apt-get update -q && timeout 300 apt-get install -y -q --no-install-recommends $missing; } >&2 ||
            echo "test-engines: could not install$missing" >&2
    else
        echo "test-engines: missing$missing; on Debian: apt-get install$missing" >&2
    fi
fi

# What validates manifests: small packages beside the environment, not in it.
validators=.venv-validators
if ! [ -f "$validators/.ready" ]; then
    rm -rf "$validators"
    if timeout 120 .venv/bin/python -m pip install -q --disable-pip-version-check --target "$validators" \
        "kubernetes-validate>=1.37" "kubeflow-trainer-api>=2.3" >&2; then
        touch "$validators/.ready"
    else
        echo "test-engines: could not install kubernetes-validate and kubeflow-trainer-api" >&2
    fi
fi
export SYNCLINE_TEST_VALIDATORS="$PWD/$validators"

# Ray is large, and has an environment of its own: the tests start its commands there. The smoke part does not make it.
case " $* " in
*" smoke "*) [ -f .venv-ray/.setup ] || echo "test-engines: without Ray: make test-engines makes its environment" >&2 ;;
*) timeout 600 sh tools/setup_ray.sh || echo "test-engines: could not install Ray" >&2 ;;
esac
[ -f .venv-ray/.setup ] && export SYNCLINE_TEST_RAY="$PWD/.venv-ray/bin"

set -- .venv/bin/python -m pytest -q -rs tests/engines -m "engines and not figures" "$@"
# What an engine starts ends with these tests, however they end: they have a namespace of processes of their own. Its
# first process, the shell, collects orphans.
if [ "$(id -u)" -eq 0 ] && unshare --pid --fork --kill-child --mount-proc true 2>/dev/null; then
    # shellcheck disable=SC2016  # the inner shell expands it
    exec unshare --pid --fork --kill-child --mount-proc sh -c '"$@"; exit $?' sh "$@"
fi
exec "$@"
