"""Placement of large language models over CPU and GPU, operator by operator, for unmodified llama.cpp."""

from __future__ import annotations

__version__ = "0.1.0"
