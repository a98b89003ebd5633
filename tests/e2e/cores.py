"""Whether a device that keeps time has a core of its own here."""

from __future__ import annotations

import os

import pytest

needs_a_core = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core: a device that keeps time needs one of its own"
)
