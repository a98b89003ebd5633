"""Back ends that a stock program loads for a plan's devices: the user's (--backend), and that of emulated cards."""

from __future__ import annotations

import os
from collections.abc import Mapping

from oallama.device.emulated import all_parameters
from oallama.device.spec import parse_device
from oallama.device.user_backend import user_backend
from oallama.plan.export import PARAMETERS_VARIABLE, Backend
from oallama.profile.emulate import kept_parameters, resolved


def stock_backend(device: str, environment: Mapping[str, str] = os.environ) -> Backend | None:
    """device: of the plan, as --device names it. environment: where --backend left its library. None where the program
    needs no other back end. Raises UsageError for an emulated card that cannot be created here, BridgeError."""
    from ggml_bridge.library import find_built

    spec, backend = parse_device(device), user_backend(environment)
    if not spec.is_emulated:
        return None if backend is None else Backend(backend)
    cards = [one.emulated for one in resolved(spec, None)[0].each if one.emulated]
    parameters = kept_parameters(all_parameters(cards))
    libraries = [*([backend] if backend else []), str(find_built("ggml-emulated"))]
    return Backend(":".join(libraries), {PARAMETERS_VARIABLE: parameters})
