"""Errors from below Python. Each message is one sentence: the fault and, where there is one, its remedy."""

from __future__ import annotations

import signal as signals


class BridgeError(RuntimeError):
    """The native libraries are missing, failed to load, or refused a request."""


class VersionMismatch(BridgeError):
    """The llama.cpp or llama-cpp-python that was found is laid out in a way that is not known."""


class Unsupported(BridgeError):
    """A device, layout or type cannot do what was asked; nothing is broken."""


class OutOfMemory(BridgeError):
    """An allocation failed, in host memory or on a device."""


class ChildDied(BridgeError):
    """A child process ended without an answer.

    signal: number of the signal that killed it, or None; exit_code: its exit status, or None if a signal killed it;
    stderr_tail: the last text it wrote to stderr.
    """

    def __init__(self, module: str, returncode: int, stderr_tail: str = "") -> None:
        self.signal = -returncode if returncode < 0 else None
        self.exit_code = returncode if returncode >= 0 else None
        self.stderr_tail = stderr_tail
        how = f"with exit code {returncode}" if self.signal is None else f"by {signal_name(self.signal)}"
        super().__init__(f"the child process {module} died {how}" + (f": {self.last_words}" if self.last_words else ""))

    @property
    def last_words(self) -> str:
        """The last line it wrote to stderr, without the name that oallama puts before a failure; "" for none."""
        lines = [line.strip() for line in self.stderr_tail.splitlines() if line.strip()]
        return lines[-1].removeprefix("oallama: ") if lines else ""


class ChildTimeout(BridgeError):
    """A child process did not answer in time and was ended."""


_MEANINGS = {
    "SIGABRT": "an assertion in native code failed",
    "SIGSEGV": "native code accessed memory that it does not own",
    "SIGBUS": "native code accessed missing memory, e.g. a file cut short while mapped",
    "SIGILL": "native code was compiled for another CPU",
    "SIGFPE": "native code divided by zero",
    "SIGKILL": "killed from outside, perhaps for using too much memory",
}


def signal_name(number: int) -> str:
    """`SIGSEGV (native code touched memory that is not its own)`: name and usual meaning of a deadly signal."""
    try:
        name = signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} ({_MEANINGS[name]})" if name in _MEANINGS else name
