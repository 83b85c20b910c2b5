"""Jobs whose workers use several frameworks, as processes."""

from __future__ import annotations

from tests.launch.conftest import Commands, commands

__all__ = ["Commands", "commands"]
