"""What is told to people: through the job where there is one, once for all workers; else on standard error."""

from __future__ import annotations

import sys

from syncline.worker.current import current_job, has_current_job


def say(text: str) -> None:
    if has_current_job():
        current_job().notice(text)
        return
    sys.stderr.write(f"syncline: {text}\n")
    sys.stderr.flush()
