"""Whole jobs inside one process, for tests and notebooks."""

from syncline.testing.local import LocalJob, local_job

__all__ = ["LocalJob", "local_job"]
