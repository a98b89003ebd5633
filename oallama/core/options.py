"""Options of placing and loading a model, for the command line and Python, and their values in llama.cpp. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from oallama.core.errors import UsageError
from oallama.core.keywords import check_fields, record_from
from oallama.core.types import Attention, FlashAttention
from oallama.core.units import parse_memory, parse_share

T = TypeVar("T")

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # enum llama_flash_attn_type

CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7,
}  # fmt: skip
"""ggml types llama.cpp offers for the KV cache (-ctk, -ctv), by number."""

PLAIN_V_TYPES = ("f16", "f32", "bf16")
"""Types of the V cache that work without flash attention; llama.cpp refuses others."""

DEFAULT_ATTENTION = Attention()
DEFAULT_BATCH, DEFAULT_UBATCH = 2048, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to place and load a model. None: the plan or the machine decides.

    device: `--device` text; None: all local GPUs, or none. vram: bytes of device memory to plan with; None: the
    free memory. other_vram: of each device behind the first; (): their free memory. vram_fill: share of it that may be
    used. gpu_weights: largest share of the operators' weight bytes on the device. threads: CPU threads; None: one per
    physical core. n_ctx, n_batch, n_ubatch: tokens; n_ctx 0: what the model was trained on. type_k, type_v: of the KV
    cache. flash_attn "auto": whichever is predicted to be faster. late_first_word: whether a plan may win whose first
    word comes more than 1.25 times as late as with llama.cpp's own placement.

    Raises UsageError for an invalid value, and for a V cache type that needs flash attention while that is off.
    """

    device: str | None = None
    vram: int | None = None
    vram_fill: float = 0.9
    gpu_weights: float | None = None
    threads: int | None = None
    n_ctx: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    flash_attn: FlashAttention = "auto"
    late_first_word: bool = False
    other_vram: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.vram_fill <= 1:
            raise UsageError(f"--vram-fill must be above 0 and at most 1, not {self.vram_fill:g}")
        if self.gpu_weights is not None and not 0 <= self.gpu_weights <= 1:
            raise UsageError(f"--gpu-weights must be from 0 to 1 (0 % to 100 %), not {self.gpu_weights:g}")
        if min(self.vram or 0, *self.other_vram, 0) < 0:
            raise UsageError("--vram must not be negative; give a size such as 6GiB")
        if self.flash_attn not in FLASH_ATTENTION:
            raise UsageError(f"unknown -fa {self.flash_attn!r}; choose from {', '.join(FLASH_ATTENTION)}")
        cache_type(self.type_k or DEFAULT_ATTENTION.type_k)
        cache_type(self.type_v or DEFAULT_ATTENTION.type_v)
        self.attention()

    @classmethod
    def given(cls, **values: Any) -> Options:
        """Read the keywords of Placer.load: sizes and shares may be strings ("6GiB", "50%"); vram of several devices is
        "10GiB,6GiB"; None: not given. Raises UsageError."""
        sizes = _parsed(parse_sizes, values.get("vram"), "--vram")
        if isinstance(sizes, tuple):
            values["vram"], *others = sizes
            values["other_vram"] = tuple(others)
        if "gpu_weights" in values:
            values["gpu_weights"] = _parsed(parse_share, values["gpu_weights"], "--gpu-weights")
        known = {name: value for name, value in values.items() if value is not None or name not in cls.__slots__}
        return record_from(cls, known, "Placer option")

    def attention(self, planned: Attention = DEFAULT_ATTENTION) -> Attention:
        """The requested attention, with `planned` for what was not requested. Raises UsageError if flash attention is
        off and the V cache's type needs it."""
        asks = self.flash_attn != "auto"
        flash_attn: FlashAttention = self.flash_attn if asks else planned.flash_attn
        type_k, type_v = (self.type_k or planned.type_k).lower(), (self.type_v or planned.type_v).lower()
        if flash_attn == "off" and type_v not in PLAIN_V_TYPES:
            if asks:
                raise UsageError(
                    f"a V cache of type {type_v} needs flash attention; omit -fa off, or choose "
                    f"{', '.join(PLAIN_V_TYPES)} with -ctv"
                )
            flash_attn = "on"
        return Attention(flash_attn, type_k, type_v)


def cache_type(name: str) -> int:
    """The ggml type number of a KV cache type. Raises UsageError that lists the known types."""
    try:
        return CACHE_TYPES[name.lower()]
    except KeyError:
        raise UsageError(f"unknown KV cache type {name!r}; choose from {', '.join(CACHE_TYPES)}") from None


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes between commas, in bytes. Raises ValueError."""
    return tuple(map(parse_memory, text.split(",")))


def _parsed(parse: Callable[[str], T], value: T | str | None, option: str) -> T | None:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
