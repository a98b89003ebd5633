"""The exceptions of the public API. Each message is one sentence: what is wrong and what to do.

Exit codes of the command line: usage and unusable input give 2, failed work gives 1.
"""

from __future__ import annotations

import re

from oallama.core.units import format_bytes

PYTHON_NAMES = {
    "--affinity": "affinity", "--device": "device", "--fill": "fill", "--gpu-weights": "gpu_weights",
    "--min-p": "min_p", "--policy": "policy", "--repeat-penalty": "repeat_penalty", "--stop": "stop",
    "--temp": "temperature", "--threads": "threads", "--tokens": "tokens", "--top-k": "top_k", "--top-p": "top_p",
    "--vram": "vram", "--vram-fill": "vram_fill", "-b": "n_batch", "-c": "n_ctx", "-ctk": "type_k", "-ctv": "type_v",
    "-fa": "flash_attn", "-n": "n_gen", "-ngl": "gpu_layers", "-p": "n_prompt", "-ub": "n_ubatch",
}  # fmt: skip
"""Options of the command line, by which messages name things, and the arguments that they are in Python."""

_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


class OallamaError(Exception):
    """Base of every error this package raises on purpose.

    The message names options as the command line does; a note below it, which tracebacks show, says what they are
    called in Python.
    """

    exit_code = 1

    def __init__(self, *values: object) -> None:
        super().__init__(*values)
        options = dict.fromkeys(_OPTION.findall(str(self)))
        named = [f"{PYTHON_NAMES[option]} for {option}" for option in options if option in PYTHON_NAMES]
        if named:
            self.__notes__ = [f"in Python: {', '.join(named)}"]  # as add_note does, which Python 3.10 lacks


class ModelFileError(OallamaError):
    """The GGUF is missing, cut, malformed or of a kind that cannot be run."""

    exit_code = 2


class ProfileError(OallamaError):
    """A profile cannot be measured, read, or does not belong to this machine or model."""


class PlanError(OallamaError):
    """A plan file or a plan is malformed, inconsistent, or made for another model."""

    exit_code = 2


class UsageError(OallamaError):
    """Options that cannot be honoured as given."""

    exit_code = 2


class DeviceError(OallamaError):
    """A device cannot be reached, or was lost while working."""


class UnknownDevice(DeviceError):
    """There is no device of that name."""

    exit_code = 2


class BridgeError(OallamaError):
    """The native libraries are missing, of another version, or failed to load."""


class OutOfTime(OallamaError):
    """A measurement had not ended when its time was over."""


class DownloadError(OallamaError):
    """A model cannot be fetched: no network, no room on the disk, or the hub fails."""


class DoesNotFit(OallamaError):
    """What must be on a device is larger than what the device may hold.

    Attributes: required, available (bytes); device (ggml device name).
    """

    def __init__(self, required: int, available: int, device: str, what: str = "the model", remedy: str = "") -> None:
        self.required = required
        self.available = available
        self.device = device
        self.what = what
        message = (
            f"{what} needs {format_bytes(required)} on {device} but only {format_bytes(available)} may be used"
            f"; {remedy or 'use a shorter context (-c), a smaller -ub, or more --vram'}"
        )
        super().__init__(message)


def named_error(type_name: str, message: str) -> OallamaError:
    """The error of ours that a child process reported by the name of its type; OallamaError, naming it, for another."""
    kinds = (ModelFileError, ProfileError, PlanError, UsageError, DeviceError, UnknownDevice, BridgeError)
    kind = next((kind for kind in kinds if kind.__name__ == type_name), None)
    return kind(message) if kind else OallamaError(f"{type_name}: {message}")
