#!/bin/sh
# Runs tests/engines: jobs that Open MPI, MPICH's Hydra and torchrun start. Called by `make test-engines`, with arguments
# of pytest. As root on Debian it installs the engines that are missing; what is still missing is skipped, with the reason.
set -eu
cd "$(dirname "$0")/.."

missing=""
command -v mpirun.openmpi >/dev/null || missing="$missing openmpi-bin"
command -v mpiexec.hydra >/dev/null || missing="$missing mpich"
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

exec .venv/bin/python -m pytest -q -rs tests/engines -m engines "$@"
