"""Whole jobs inside one process, and a proxy that does harm, for tests and notebooks."""

from syncline.testing.local import LocalJob, local_job
from syncline.testing.proxy import Proxy

__all__ = ["LocalJob", "Proxy", "local_job"]
