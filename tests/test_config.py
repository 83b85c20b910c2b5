"""Settings: who wins over whom, and what each mistake is told."""

from __future__ import annotations

import pathlib
from typing import Any, Literal

import msgspec
import pytest

from syncline import config
from syncline.config import JobConfig, check_known, read_toml, resolve
from syncline.errors import ConfigError


def test_launch_wins_over_toml_wins_over_init_wins_over_defaults() -> None:
    launch, toml, init = {"window": 1}, {"window": 2, "servers": 2}, {"window": 3, "servers": 3, "device": "cpu"}
    resolved = resolve(launch, toml, init)
    assert (resolved.window, resolved.servers, resolved.device) == (1, 2, "cpu")
    assert resolved.workers == JobConfig().workers
    assert resolve() == JobConfig()


def test_what_is_said_wins_even_when_it_is_the_default() -> None:
    """`--policy sync` at launch must beat `policy = "async"` in the file, although sync is the default."""
    assert resolve({"policy": "sync"}, {"policy": "async"}).policy == "sync"
    assert resolve({"window": 0}, {"window": 4}).window == 0


def test_an_unknown_setting_names_its_source_and_lists_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        check_known({"worker": 4}, "init()")
    assert str(caught.value).startswith("init(): unknown setting 'worker'; choose from: ack, ")
    assert all(field.name in str(caught.value) for field in msgspec.structs.fields(JobConfig))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("workers", "four", "here: workers = 'four': Expected `int`, got `str`"),
        ("workers", "4", "here: workers = '4': Expected `int`, got `str`"),
        ("workers", 2.5, "here: workers = 2.5: Expected `int`, got `float`"),
        ("workers", True, "here: workers = True: Expected `int`, got `bool`"),
        ("policy", 3, "here: policy = 3: Expected `str`, got `int`"),
        ("wait_seconds", "soon", "here: wait_seconds = 'soon': Expected `float`, got `str`"),
        ("name", None, "here: name = None: Expected `str`, got `null`"),
    ],
)
def test_a_wrong_type_names_source_setting_and_value(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_known({key: value}, "here")
    assert str(caught.value) == message


def test_whole_seconds_are_seconds() -> None:
    assert check_known({"wait_seconds": 5}, "here") == {"wait_seconds": 5.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers = 0: must be at least 1"),
        ({"workers": -3}, "workers = -3: must be at least 1"),
        ({"workers": 10**12}, "workers = 1000000000000: must be at most 65536"),
        ({"servers": 0}, "servers = 0: must be at least 1"),
        ({"sync_every": 0}, "sync_every = 0: must be at least 1"),
        ({"pull_every": 0}, "pull_every = 0: must be at least 1"),
        ({"window": -1}, "window = -1: must be at least 0"),
        ({"window": 1024}, "window = 1024: must be at most 1023"),
        ({"bad_pushes": 0}, "bad_pushes = 0: must be at least 1"),
        ({"slice_bytes": 63}, "slice_bytes = 63: must be at least 64"),
        ({"start_seconds": 0.0}, "start_seconds = 0.0: must be at least 0.001"),
        ({"wait_seconds": float("nan")}, "wait_seconds = nan: must be at least 0.001"),
        ({"wait_seconds": float("inf")}, "wait_seconds = inf: must be at most 1000000000"),
        ({"transport": "udp"}, "transport = 'udp': must be one of auto, shm, tcp"),
        ({"exchange": "star"}, "exchange = 'star': must be one of servers, ring"),
        ({"replicas": 3}, "replicas = 3: must be at most 2"),
        ({"env": "mpi"}, "env = 'mpi': must be torchrun"),
        ({"name": "a/b"}, "name = 'a/b': it is also the name of a folder, and must not contain '/'"),
        ({"name": ".."}, "name = '..': it is also the name of a folder, and must not contain '/'"),
        ({"name": "a\0b"}, "name = 'a\\x00b': it is also the name of a folder, and must not contain '/'"),
        ({"name": "\udcff"}, "name = '\\udcff': it is also the name of a folder, and must not contain '/'"),
        ({"name": "n" * 201}, f"name = '{'n' * 20}'…: it is also the name of a folder: at most 200 bytes"),
    ],
)
def test_a_value_that_cannot_be_says_what_can(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(settings)
    assert str(caught.value) == message


def test_every_number_has_limits() -> None:
    """A number without them would be met by a traceback far from where it was typed."""
    numbers = {
        field.name for field in msgspec.structs.fields(JobConfig) if field.type in (int, float, int | Literal["auto"])
    }
    assert set(config.LIMITS) == numbers


@pytest.mark.parametrize(("said", "is_local"), [("auto", True), (1, False), (4, True)])
def test_sync_every_is_a_number_or_auto(said: Any, is_local: bool) -> None:
    """As `auto` it is kept and carried as the user said it, to members and into manifests."""
    assert check_known({"sync_every": said}, "here") == {"sync_every": said}
    found = resolve({"sync_every": said})
    assert (found.sync_every, found.steps_locally) == (said, is_local)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=JobConfig) == found


def test_sync_every_is_no_other_word() -> None:
    with pytest.raises(ConfigError, match="here: sync_every = 'often': must be a number of steps, or auto"):
        check_known({"sync_every": "often"}, "here")


def test_a_folder_without_the_file_has_no_settings(tmp_path: pathlib.Path) -> None:
    assert read_toml(tmp_path) == {}


def test_the_file_is_read_and_checked(tmp_path: pathlib.Path) -> None:
    (tmp_path / "syncline.toml").write_text('workers = 4\npolicy = "bounded:2"\n')
    assert read_toml(tmp_path) == {"workers": 4, "policy": "bounded:2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"workers = ", "syncline.toml: Invalid value (at end of document)"),
        (b"workers = 4\nworkers = 5", "syncline.toml: Cannot overwrite a value"),
        (b"worker = 4", "syncline.toml: unknown setting 'worker'; choose from: ack, "),
        (b"[workers]\ncount = 4", "syncline.toml: workers = {'count': 4}: Expected `int`, got `object`"),
        (b'policy = "\xff"', "syncline.toml: cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_broken_file_is_named_with_what_is_broken(tmp_path: pathlib.Path, text: bytes, message: str) -> None:
    (tmp_path / "syncline.toml").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert message in str(caught.value)


def test_a_folder_in_place_of_the_file_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "syncline.toml").mkdir()
    with pytest.raises(ConfigError, match=r"syncline\.toml: cannot be read: .*directory"):
        read_toml(tmp_path)


def test_what_only_a_launch_can_know_are_settings() -> None:
    assert {field.name for field in msgspec.structs.fields(JobConfig)} >= config.LAUNCH_ONLY


@pytest.mark.parametrize(("value", "count"), [("", 0), ("0,1", 2), ("-1", 0), ("3", 1), ("GPU-a,GPU-b,", 2)])
def test_gpus_are_counted_as_the_workers_will_see_them(monkeypatch: Any, value: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert config.num_gpus() == count


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert config.cache_folder() == pathlib.Path("/somewhere/syncline")
    monkeypatch.setenv("SYNCLINE_DATA", "")
    assert config.data_folder() is None
