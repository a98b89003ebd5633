"""`python -m oallama.run.die_with_parent PROGRAM ARGUMENT…`: asks Linux to kill this process when the thread that
started it ends, then replaces itself by the program (exec keeps the request)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence


def ending_with_parent(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment that start a program so that it ends with this thread."""
    from ggml_bridge.child import PARENT_VARIABLE, python_module

    return [*python_module("oallama.run.die_with_parent"), *command], {**environment, PARENT_VARIABLE: str(os.getpid())}


def main(command: list[str]) -> None:
    """Raises OSError if the program cannot be run."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python prints a traceback
    from ggml_bridge.child import PARENT_VARIABLE, die_with_parent

    die_with_parent()
    os.environ.pop(PARENT_VARIABLE, None)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
