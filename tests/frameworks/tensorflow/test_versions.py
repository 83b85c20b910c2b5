"""Versions of frameworks: also of distributions that have another name than the package."""

from __future__ import annotations

import importlib.metadata

import keras
import pytest
import tensorflow as tf

import syncline
from syncline.keras import versions


def test_a_distribution_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example keras-nightly or tensorflow-rocm: the module says its version itself."""

    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert versions.installed("keras") == keras.__version__
    assert versions.installed("tensorflow") == tf.__version__
    versions.check_versions("keras", "tensorflow")
    monkeypatch.setattr(keras, "__version__", "3.9.0.dev1")
    with pytest.raises(syncline.ConfigError, match=rf"keras 3\.9\.0\.dev1 is too old: {versions.LOWEST['keras']}"):
        versions.check_versions("keras")
