#!/bin/sh
# Runs all tests of serving, with the real clients of the protocol. Called by `make test-serve`, with arguments of pytest.
# It installs the clients that are missing into .venv.
set -eu
cd "$(dirname "$0")/.."

.venv/bin/python -c 'import tritonclient.grpc, tritonclient.http' 2>/dev/null ||
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt 'tritonclient[http,grpc]>=2.60'

exec .venv/bin/python -m pytest -q -rs tests/serve -m "clients or not proof and not soak" "$@"
