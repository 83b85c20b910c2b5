"""Who may read the page: codes that work once, cookies that follow from them, and a token for machines.

Cookies and the token follow from the job's secret: they outlive the coordinator that gave them. A code does not: it
works once, at the coordinator that made it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading

#: A code that was not used is void after this time.
CODE_SECONDS = 900.0
#: A browser asks again after this time.
COOKIE_SECONDS = 7 * 86_400
#: Codes that are open at a time; the oldest are dropped.
MOST_CODES = 64


class Access:
    """Gives codes, and checks what a request brings. Any thread may call it."""

    def __init__(self, job: str, token: bytes) -> None:
        self.cookie_name = f"syncline_{job[:16]}"  # cookies do not know ports: other jobs have others
        self._key = hmac.digest(token, b"syncline: the page of a job", hashlib.sha256)
        self._codes: dict[str, float] = {}  # code -> when it was made
        self._lock = threading.Lock()

    def new_code(self, now: float) -> str:
        code = secrets.token_urlsafe(18)
        self.add_code(code, now)
        return code

    def add_code(self, code: str, now: float) -> None:
        """Adds a code that was made elsewhere."""
        with self._lock:
            while len(self._codes) >= MOST_CODES:
                del self._codes[next(iter(self._codes))]
            self._codes[code] = now

    def redeem(self, code: str, now: float) -> str | None:
        """The cookie for a code; None if there is no such code, or it was used, or is too old."""
        with self._lock:
            known = next((one for one in self._codes if hmac.compare_digest(one.encode(), code.encode())), None)
            made = self._codes.pop(known) if known is not None else None
        if made is None or now - made > CODE_SECONDS:
            return None
        said = f"{secrets.token_hex(8)}.{int(now) + COOKIE_SECONDS}"
        return f"{said}.{self._mac('cookie', said)}"

    def allows_cookie(self, value: str, now: float) -> bool:
        said, _, mac = value.rpartition(".")
        if not hmac.compare_digest(self._mac("cookie", said).encode(), mac.encode()):
            return False
        until = said.rpartition(".")[2]
        return until.isdecimal() and len(until) < 16 and now < int(until)

    @property
    def token(self) -> str:
        """What machines send: `Authorization: Bearer TOKEN`."""
        return self._mac("token", "")

    def allows_token(self, value: str) -> bool:
        return hmac.compare_digest(self.token.encode(), value.encode())

    def _mac(self, kind: str, text: str) -> str:
        return hmac.new(self._key, f"{kind}:{text}".encode(), hashlib.sha256).hexdigest()
