# What tools/setup.sh and tools/setup_frameworks.sh share: virtual environments, where Python may be too old or lack
# ensurepip. It is read with `.` in the repository's folder, and asks for three variables:
#   NAME    the target of make that messages name
#   VENV    the folder of the environment
#   STAMP   a file in it that holds what the environment was made from; its first line is the repository's folder

tools=$(pwd)/tools

# up_to_date: was the environment made from what `wanted` prints now?
up_to_date() { [ -x "$VENV/bin/python" ] && [ -f "$STAMP" ] && wanted | cmp -s - "$STAMP"; }

say() { printf '%s: %s\n' "$NAME" "$*" >&2; }
stop() {
    say "$@"
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }
is_root() { [ "$(id -u)" -eq 0 ]; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || stop "PYTHON=$PYTHON is not a Python of version 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    # A name that is found may still not run (version switchers leave such stubs): each one is tried.
    for name in python3 python3.13 python3.12 python3.11; do
        if new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    found=$(python3 --version 2>/dev/null || echo "no python3")
    stop "Python 3.11 or newer is needed; found: $found. Install one (Debian: apt install python3 python3-venv)," \
        "or name it: make $NAME PYTHON=/path/to/python3.12"
}

# A Debian python3 has no ensurepip until python3-venv is installed.
has_ensurepip() { "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; }

install_venv_module() {
    have apt-get && is_root || return 1
    minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "installing python$minor-venv"
    export DEBIAN_FRONTEND=noninteractive
    for package in "python$minor-venv" python3-venv; do
        apt-get install -y -q --no-install-recommends "$package" >/dev/null 2>&1 && has_ensurepip && return 0
    done
    apt-get update -q >/dev/null 2>&1 || true
    for package in "python$minor-venv" python3-venv; do
        apt-get install -y -q --no-install-recommends "$package" >/dev/null 2>&1 && has_ensurepip && return 0
    done
    return 1
}

# Without root: pip's own wheel, out of the Debian package that python3-venv would have used.
pip_from_package() {
    have apt-get && have dpkg-deb || return 1
    "$python" -c 'import venv' >/dev/null 2>&1 || return 1
    folder=$(mktemp -d)
    if (cd "$folder" && sh "$tools/apt_download.sh" python3-pip-whl && dpkg-deb -x python3-pip-whl_*.deb .) \
        >/dev/null 2>&1; then
        "$python" -m venv --without-pip "$VENV"
        "$VENV/bin/python" "$(echo "$folder"/usr/share/python-wheels/pip-*.whl)/pip" install -q --no-index \
            "$folder"/usr/share/python-wheels/pip-*.whl && done_so=yes
    fi
    rm -rf "$folder"
    [ "${done_so:-}" = yes ]
}

make_venv() {
    if has_ensurepip || install_venv_module; then
        "$python" -m venv --clear "$VENV"
    elif "$python" -m virtualenv --version >/dev/null 2>&1; then
        "$python" -m virtualenv -q --clear "$VENV"
    elif ! pip_from_package; then
        rm -rf "$VENV"
        stop "this Python cannot make a virtual environment (it has no ensurepip)." \
            "Install the module and repeat: sudo apt install python3-venv"
    fi
}

# ensure_venv: makes the environment, unless there is one of this folder that works.
ensure_venv() {
    if [ ! -x "$VENV/bin/python" ] || ! new_enough "$VENV/bin/python" ||
        ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
        { [ -f "$STAMP" ] && [ "$(head -n 1 "$STAMP")" != "$(pwd)" ]; }; then
        python=$(find_python)
        say "making $VENV with $("$python" --version)"
        rm -rf "$VENV"
        make_venv
    fi
}
