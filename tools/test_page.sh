#!/bin/sh
# The web page in a real browser, a real Prometheus, views in a real terminal, and sinks with the real TensorBoard and
# MLflow. Called by `make test-page`, and with --screenshots by `make screenshots`. Installs playwright, schemathesis,
# tensorboard, mlflow-skinny and, as root on Debian, Chromium, Prometheus and tmux.
set -eu
cd "$(dirname "$0")/.."

missing=
command -v chromium >/dev/null || missing="chromium"
command -v prometheus >/dev/null || missing="$missing prometheus"
command -v tmux >/dev/null || missing="$missing tmux"
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing >/dev/null
    else
        echo "install these first: $missing" >&2
        exit 1
    fi
fi
.venv/bin/python -c 'import playwright, schemathesis, tensorboard, mlflow' 2>/dev/null ||
    .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
        playwright schemathesis tensorboard mlflow-skinny
if [ "${1:-}" = "--screenshots" ]; then
    exec .venv/bin/python tools/docs/screenshots.py docs/images
fi
exec .venv/bin/python -m pytest -q -m page tests/page tests/top tests/sinks "$@"
