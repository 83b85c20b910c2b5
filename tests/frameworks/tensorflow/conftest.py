"""TensorFlow below Keras, which runs on it."""

from __future__ import annotations

import os

from tests.frameworks.keras.conftest import commands, job, no_leaks

__all__ = ["commands", "job", "no_leaks"]

os.environ["KERAS_BACKEND"] = "tensorflow"
