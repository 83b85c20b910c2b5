"""Whole jobs inside one process, and a proxy that does harm, for tests and notebooks.

local   `local_job`: coordinator, servers and workers in one process
proxy   a proxy between two processes, which can do harm
links   one connection through it
"""

from syncline.testing.local import LocalJob, local_job
from syncline.testing.proxy import Proxy

__all__ = ["LocalJob", "Proxy", "local_job"]
