"""Native work in a child process: whatever kills or stalls it there is an error here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oallama.core.errors import BridgeError, DeviceError, ModelFileError, OallamaError, UsageError

_ERRORS: dict[str, type[OallamaError]] = {
    kind.__name__: kind for kind in (ModelFileError, DeviceError, UsageError, BridgeError)
}


def ask_child(
    module: str,
    request: Mapping[str, Any],
    timeout_s: float,
    failed: Callable[[str], OallamaError],
    unexpected: type[OallamaError] = OallamaError,
) -> dict[str, Any]:
    """What the main part of `module` answers to the request in a process of its own.

    failed: the error for a child that dies or does not answer in time, made from the reason.
    Raises that; what the child raised as the same error of ours; and `unexpected` for any other exception in the child.
    """
    import ggml_bridge
    from ggml_bridge.child import ChildError, run_in_child

    try:
        return run_in_child(module, request, timeout_s=timeout_s)
    except (ggml_bridge.ChildDied, ggml_bridge.ChildTimeout) as error:
        raise failed(str(error)) from None
    except ChildError as error:
        raise _ERRORS.get(error.type_name, unexpected)(str(error)) from None
    except (ggml_bridge.BridgeError, ValueError) as error:
        raise BridgeError(str(error)) from None
