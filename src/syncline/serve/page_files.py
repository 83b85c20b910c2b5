"""The page that tries the model in a browser: its files, and what they may load."""

from __future__ import annotations

import functools
import importlib.resources

#: Scripts, styles and requests of our own only; pictures that the user chose. Nothing may frame the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-cache"),
)
_SCRIPT, _STYLE = b"text/javascript; charset=utf-8", b"text/css; charset=utf-8"
_OWN, _OF_JOBS = "syncline.serve", "syncline.page"

#: Package, file and type by path. Words, colours and the icon are those of the page of jobs.
FILES = {
    "/": (_OWN, "index.html", b"text/html; charset=utf-8"),
    "/page/app.js": (_OWN, "app.js", _SCRIPT),
    "/page/inputs.js": (_OWN, "inputs.js", _SCRIPT),
    "/page/outputs.js": (_OWN, "outputs.js", _SCRIPT),
    "/page/serving.css": (_OWN, "serving.css", _STYLE),
    "/page/words.js": (_OF_JOBS, "words.js", _SCRIPT),
    "/page/style.css": (_OF_JOBS, "style.css", _STYLE),
    "/page/icon.svg": (_OF_JOBS, "icon.svg", b"image/svg+xml"),
}


def is_page(path: str) -> bool:
    """Whether this is a file of the page. It is the same for everybody, so it needs no token."""
    return path in FILES


@functools.cache
def page_file(path: str) -> tuple[bytes, bytes]:
    """A file of the page, and its type."""
    package, name, kind = FILES[path]
    return importlib.resources.files(package).joinpath("static", name).read_bytes(), kind
