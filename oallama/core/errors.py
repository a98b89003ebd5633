"""The exceptions of the public API. Each message is one sentence: what is wrong and what to do.

Exit codes of the command line: usage and unusable input give 2, failed work gives 1.
"""

from __future__ import annotations

from oallama.core.units import format_bytes

OUT_OF_MEMORY = "out of memory; use a smaller model, a shorter context (-c) or a smaller batch (-ub)"
GGML_OUT_OF_MEMORY = "GGML_ASSERT(ctx->mem_buffer != NULL)"
"""ggml's message when it aborts because memory was refused."""


class OallamaError(Exception):
    """Base class of oallama's errors. Messages name options of the command line."""

    exit_code = 1


class ModelFileError(OallamaError):
    """The GGUF is missing, cut, malformed or of an unsupported kind."""

    exit_code = 2


class ProfileError(OallamaError):
    """A profile cannot be measured, read, or does not belong to this machine or model."""


class PlanError(OallamaError):
    """A plan file or a plan is malformed, inconsistent, or made for another model."""

    exit_code = 2


class UsageError(OallamaError):
    """Invalid options or arguments."""

    exit_code = 2


class DeviceError(OallamaError):
    """A device cannot be reached, or was lost while working."""


class UnknownDevice(DeviceError):
    """No device has this name."""

    exit_code = 2


class BridgeError(OallamaError):
    """The native libraries are missing, have another version, or failed to load."""


class OutOfTime(OallamaError):
    """A measurement did not end in time."""


class DownloadError(OallamaError):
    """A model cannot be downloaded: no network, a full disk, or a failure of the hub."""


class DoesNotFit(OallamaError):
    """More memory is needed on a device than may be used.

    Attributes: required, available (bytes); device (ggml device name).
    """

    def __init__(self, required: int, available: int, device: str, what: str = "the model", remedy: str = "") -> None:
        self.required = required
        self.available = available
        self.device = device
        message = (
            f"{what} needs {format_bytes(required)} on {device} but only {format_bytes(available)} may be used"
            f"; {remedy or 'use a shorter context (-c), a smaller -ub, or more --vram'}"
        )
        super().__init__(message)


class DraftDoesNotFit(DoesNotFit):
    """A draft model leaves a device no room for the model."""

    exit_code = 2


def named_error(type_name: str, message: str) -> OallamaError:
    """The error that a child process reported by its type's name; for a foreign type an OallamaError that names it."""
    kinds = (ModelFileError, ProfileError, PlanError, UsageError, DeviceError, UnknownDevice, BridgeError)
    kind = next((kind for kind in kinds if kind.__name__ == type_name), None)
    return kind(message) if kind else OallamaError(f"{type_name}: {message}")
