"""Native work in a child process, so that a crash or a hang becomes an exception."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from oallama.core.errors import BridgeError, DeviceError, OallamaError, named_error
from oallama.device.native_abort import LOST

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that do not tell what the child was doing."""


def ask_child(
    module: str,
    request: Mapping[str, Any],
    timeout_s: float,
    failed: Callable[[str], OallamaError],
    unexpected: type[OallamaError] = OallamaError,
) -> dict[str, Any]:
    """Run the main part of `module` in its own process; return its answer.

    failed: makes the error for a child that dies or does not answer in time, from the reason. Raises this error;
    DeviceError for a lost device; an oallama error of the child as the same error; `unexpected` for any other exception
    in the child.
    """
    from ggml_bridge.child import run_in_child

    with child_errors(failed, unexpected):
        return run_in_child(module, request, timeout_s=timeout_s)


@contextlib.contextmanager
def child_errors(
    failed: Callable[[str], OallamaError], unexpected: type[OallamaError] = OallamaError
) -> Iterator[None]:
    """Raise a child's failure in the block as an oallama error, as ask_child does."""
    import ggml_bridge
    from ggml_bridge.child import ChildError

    try:
        yield
    except (ggml_bridge.ChildDied, ggml_bridge.ChildTimeout) as error:
        if isinstance(error, ggml_bridge.ChildDied):
            if error.last_words.startswith(LOST):
                raise DeviceError(error.last_words) from None
            if error.signal in FROM_OUTSIDE:
                raise OallamaError(f"{error}; close other programs and run again") from None
        raise failed(str(error)) from None
    except ChildError as error:
        named = named_error(error.type_name, str(error))
        raise (unexpected(str(error)) if type(named) is OallamaError else named) from None
    except (ggml_bridge.BridgeError, ValueError) as error:
        raise BridgeError(str(error)) from None
