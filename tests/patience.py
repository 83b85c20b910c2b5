"""How long a test waits for what is to happen. A machine may be starved for minutes; a test that goes well waits for
none of it. What must be waited out, because it is to pass its deadline, has a short one of its own."""

from __future__ import annotations

#: Seconds, for anything that one process waits for.
PATIENCE = 300.0
#: For whole jobs of processes: to start, to work and to end.
JOB_PATIENCE = 400.0
#: A syncline.toml for jobs whose members start when the machine lets them; and one by which, besides, who is silent
#: is slow, not dead, and a connection that closed is a death when the launcher says so, or after long.
PATIENT_START = f"start_seconds = {PATIENCE}\ncoordinator_seconds = {PATIENCE}\n"
PATIENT_TOML = (
    "deadline_seconds = 60.0\nlongest_deadline_seconds = 120.0\nsuspect_seconds = 30.0\n"
    f"follower_seconds = {PATIENCE}\n{PATIENT_START}"
)
