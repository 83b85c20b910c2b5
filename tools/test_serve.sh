#!/bin/sh
# Runs all tests of serving, with the real clients of the protocol. Called by `make test-serve`, with arguments of pytest.
# It installs the clients that are missing into .venv.
set -eu
cd "$(dirname "$0")/.."

.venv/bin/python -c 'import tritonclient.grpc, tritonclient.http, onnxruntime, onnxscript, schemathesis, playwright' 2>/dev/null ||
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
        'tritonclient[http,grpc]>=2.60' onnx onnxscript onnxruntime schemathesis playwright

command -v chromium >/dev/null || {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null
    else
        echo "install chromium first" >&2
        exit 1
    fi
}

exec .venv/bin/python -m pytest -q -rs tests/serve -m "clients or not proof and not soak" "$@"
