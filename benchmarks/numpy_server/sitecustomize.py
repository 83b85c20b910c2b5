"""On the Python path of a job, this hides torch from its servers: they compute with NumPy, as where it is missing."""

import sys

if any(word.startswith("server-") for word in sys.orig_argv):
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it fails
