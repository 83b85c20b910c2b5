"""Which member runs on which host."""

from __future__ import annotations

from syncline.config import JobConfig
from syncline.errors import ConfigError


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """`a:4,b:4` as pairs of host and number of workers; a host without a number has one."""
    found: list[tuple[str, int]] = []
    for word in text.split(","):
        host, colon, count = word.strip().rpartition(":")
        if not colon:
            host, count = count, "1"
        if not host or not count.isdigit() or int(count) < 1:
            raise ConfigError(f"-H {text!r}: give hosts and numbers of workers, e.g. a:4,b:4")
        if host in (known for known, _ in found):
            raise ConfigError(f"-H {text!r}: {host} is there twice")
        found.append((host, int(count)))
    return found


def assign(config: JobConfig) -> dict[str, str]:
    """Member name to host: workers as `hosts` says, servers in turn over the hosts."""
    if not config.hosts:
        hosts = ["local"]
        workers = ["local"] * config.workers
    else:
        pairs = parse_hosts(config.hosts)
        hosts = [host for host, _ in pairs]
        workers = [host for host, count in pairs for _ in range(count)]
    return {
        **{f"server-{k}": hosts[k % len(hosts)] for k in range(config.servers)},
        **{f"worker-{k}": host for k, host in enumerate(workers)},
    }
