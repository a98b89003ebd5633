"""The exceptions of the public API. Each message is one sentence: what is wrong and what to do.

Exit codes of the command line: usage and unusable input give 2, failed work gives 1.
"""

from __future__ import annotations

import re
from typing import ClassVar

from oallama.core.units import format_bytes

ARGUMENTS = {
    "--affinity": "affinity", "--device": "device", "--fill": "fill", "--gpu-weights": "gpu_weights",
    "--late-first-word": "late_first_word",
    "--min-p": "min_p", "--policy": "policy", "--repeat-penalty": "repeat_penalty", "--stop": "stop",
    "--temp": "temperature", "--threads": "threads", "--tokens": "tokens", "--top-k": "top_k", "--top-p": "top_p",
    "--vram": "vram", "--vram-fill": "vram_fill", "-b": "n_batch", "-c": "n_ctx", "-ctk": "type_k", "-ctv": "type_v",
    "-fa": "flash_attn", "-n": "n_gen", "-ngl": "gpu_layers", "-p": "n_prompt", "-t": "threads", "-ub": "n_ubatch",
}  # fmt: skip
"""Options of the command line, which messages use, and the Python arguments that replace them; if two options have the
same argument, the last is the command line's spelling."""

_CALLS = {
    "`oallama plan`": "`placer.plan()`",
    "`oallama plan -o`": "`plan.save(path)`",
    "`oallama profile`": "`placer.profile()`",
    "use --no-chat to": "use `generate` to",
}

_WORDS = "auto|cpu|fit|full|layers|none|oato|off|on|paper"
_OPTION = re.compile(
    rf"(?<![\w-])(--?[a-z][a-z-]*)(?: (-?\d[\w.%]*|'[^']*'|(?:{_WORDS}|(?:emulated|rpc)[^\s`]*?)(?=[,;:.)]*(?:\s|$))))?"
)
"""An option, and its value if one of these follows."""


OUT_OF_MEMORY = "out of memory; use a smaller model, a shorter context (-c) or a smaller batch (-ub)"
GGML_OUT_OF_MEMORY = "GGML_ASSERT(ctx->mem_buffer != NULL)"
"""ggml's message when it aborts because memory was refused."""


class OallamaError(Exception):
    """Base class of oallama's errors. Messages name options of the command line; in a program that uses `oallama`'s
    public names they name Python arguments instead."""

    exit_code = 1
    speaks_python: ClassVar[bool] = False  # of this process

    def __str__(self) -> str:
        return spoken(super().__str__())


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
        self.what = what
        message = (
            f"{what} needs {format_bytes(required)} on {device} but only {format_bytes(available)} may be used"
            f"; {remedy or 'use a shorter context (-c), a smaller -ub, or more --vram'}"
        )
        super().__init__(message)


class DraftDoesNotFit(DoesNotFit):
    """A draft model leaves a device no room for the model."""

    exit_code = 2


def spoken(message: str) -> str:
    """A message as this process shows it: with Python arguments instead of options if it speaks Python."""
    return in_python(message) if OallamaError.speaks_python else message


def in_python(message: str) -> str:
    """A message with options, e.g. `--vram 6GiB`, as Python arguments, vram=6GiB."""

    def argument(match: re.Match[str]) -> str:
        option, value = match.groups()
        name = ARGUMENTS.get(option)
        if name is None:
            return match[0]
        quoted = value and not value.startswith("'") and not value.lstrip("-")[0].isdigit()
        return f"{name}={value!r}" if quoted else f"{name}={value}" if value else name

    for command, call in _CALLS.items():
        message = message.replace(command, call)
    return _OPTION.sub(argument, message)


def named_error(type_name: str, message: str) -> OallamaError:
    """The error that a child process reported by its type's name; for a foreign type an OallamaError that names it."""
    kinds = (ModelFileError, ProfileError, PlanError, UsageError, DeviceError, UnknownDevice, BridgeError)
    kind = next((kind for kind in kinds if kind.__name__ == type_name), None)
    return kind(message) if kind else OallamaError(f"{type_name}: {message}")
