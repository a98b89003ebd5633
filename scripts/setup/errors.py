"""Errors of set-up, each with the one sentence that says what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable


class SetupError(Exception):
    """Set-up cannot go on. The message is one sentence: what is wrong and what to do.

    `tail` holds the last lines of the failed command's output, oldest first; empty when no command failed.
    """

    def __init__(self, message: str, tail: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.tail = tuple(tail)


class UsageError(SetupError):
    """The user asked for something that does not exist (exit code 2)."""


# Most specific first: a full disk also breaks the compiler, a dead network also "finds no version".
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device|\[Errno 28\]|Disk quota exceeded",
        "the disk is full: free about 2 GB, or set OALLAMA_CACHE_DIR to a folder on another disk",
    ),
    (
        r"Killed signal terminated program|(fatal|internal compiler) error: Killed|virtual memory exhausted",
        "the compiler ran out of memory: run again with CMAKE_BUILD_PARALLEL_LEVEL=1",
    ),
    (
        r"ensurepip is not available|No module named '?(venv|ensurepip)",
        "Python's venv module is missing: install it (Debian and Ubuntu: sudo apt install python3-venv)",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerificationError",
        "the package index's certificate was refused: set PIP_CERT to your certificate bundle, or correct the clock",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|NewConnectionError|Network is unreachable"
        r"|Connection refused|ConnectTimeoutError|ReadTimeoutError|ProxyError|getaddrinfo failed|Max retries exceeded",
        "the Python package index cannot be reached: check the network, or name a mirror in PIP_INDEX_URL",
    ),
    (
        r"DO NOT MATCH THE HASHES",
        "the package index gave a package whose hash differs from the one that was looked at: name another index in "
        "PIP_INDEX_URL",
    ),
    (
        r"No matching distribution found|Could not find a version that satisfies",
        "the package index has no fitting version: check PIP_INDEX_URL and that this Python is supported, "
        "or set OALLAMA_UNLOCKED=1 for the versions that it has",
    ),
    (
        r"No CMAKE_CXX?_COMPILER could be found|is not able to compile a simple test program",
        "no working C++ compiler: install one (Debian and Ubuntu: sudo apt install g++; macOS: xcode-select --install)",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "nvcc does not support this C++ compiler: set CUDAHOSTCXX to one that it does, or OALLAMA_BACKEND=cpu",
    ),
    (r"Permission denied|\[Errno 13\]", "a file cannot be written: check who owns the project and the cache folder"),
)


def remedy(output: Iterable[str]) -> str | None:
    """The remedy for the first known fault that the output of a failed command shows; None when none is known."""
    text = "\n".join(output)
    for pattern, advice in _REMEDIES:
        if re.search(pattern, text):
            return advice
    return None
