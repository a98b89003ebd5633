"""Back ends that a stock program loads for the device of a plan: the user's (--backend), and the emulated card's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from oallama.device.emulated import parameters_of, use_parameters
from oallama.device.spec import parse_device
from oallama.device.user_backend import user_backend
from oallama.plan.export import PARAMETERS_VARIABLE, Backend
from oallama.profile.emulate import kept_parameters, resolved


def stock_backend(device: str, environment: Mapping[str, str] = os.environ) -> Backend | None:
    """device: of the plan, as --device names it. environment: where --backend left its library. None where the program
    needs no other back end. Raises UsageError for an emulated card that cannot be had here, BridgeError."""
    from ggml_bridge.library import find_built

    spec, backend = parse_device(device), user_backend(environment)
    if not spec.is_emulated:
        return None if backend is None else Backend(backend)
    emulated = resolved(spec, None)[0].emulated
    assert emulated is not None
    parameters = kept_parameters(parameters_of(emulated) + use_parameters(emulated))
    libraries = [*([backend] if backend else []), str(find_built("ggml-emulated"))]
    return Backend(":".join(libraries), {PARAMETERS_VARIABLE: parameters})
