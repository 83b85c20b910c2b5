"""Who may read the page: a code once, a cookie until it is old, a token, and nobody else."""

from __future__ import annotations

from syncline.page.access import CODE_SECONDS, COOKIE_SECONDS, MOST_CODES, Access

TOKEN = bytes(range(32))


def test_a_code_works_once_and_not_for_long() -> None:
    access = Access("job", TOKEN)
    code, old = access.new_code(100.0), access.new_code(100.0)
    cookie = access.redeem(code, 101.0)
    assert cookie is not None and access.allows_cookie(cookie, 102.0)
    assert access.redeem(code, 102.0) is None, "used"
    assert access.redeem(old, 101.0 + CODE_SECONDS) is None, "too old"
    assert access.redeem("", 101.0) is None and access.redeem("ü\udc80" * 3, 101.0) is None


def test_a_cookie_outlives_the_coordinator_but_not_its_job() -> None:
    first = Access("job", TOKEN)
    cookie = first.redeem(first.new_code(0.0), 0.0)
    assert cookie is not None
    assert Access("job", TOKEN).allows_cookie(cookie, 1.0)
    assert not Access("job", TOKEN[::-1]).allows_cookie(cookie, 1.0), "of another job"
    assert not first.allows_cookie(cookie, COOKIE_SECONDS + 1.0), "too old"
    said, _, mac = cookie.rpartition(".")
    name, _, until = said.rpartition(".")
    for forged in (f"{name}.{int(until) + 9}.{mac}", f"x{cookie}", said, mac, "", "..", f"{said}.ü", first.token):
        assert not first.allows_cookie(forged, 1.0), forged


def test_the_token_is_not_the_secret_of_the_job() -> None:
    access = Access("job", TOKEN)
    assert access.allows_token(access.token) and not access.allows_token(access.token[:-1])
    assert access.token != TOKEN.hex() and not access.allows_token("") and not access.allows_token("ü")


def test_codes_are_bounded() -> None:
    access = Access("job", TOKEN)
    codes = [access.new_code(0.0) for _ in range(MOST_CODES + 5)]
    assert access.redeem(codes[0], 1.0) is None and access.redeem(codes[-1], 1.0) is not None
