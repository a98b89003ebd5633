"""A GPU described by its rates, for emulated devices and for predictions without measurements."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from oallama.core.codec import NotNegative, Positive, Size

FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types of weights that are multiplied in floating point; all others in integers."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card's rates as reached by ggml's kernels and llama.cpp's copies, not its peaks.

    A kernel takes max(flop / flop rate, bytes / bytes_per_s) + kernel_s; a copy takes bytes / rate + copy_s.
    """

    name: str  # as a preset is called: rtx3060-12
    description: str
    memory_bytes: Size
    bytes_per_s: Positive  # of the card's memory
    flops_per_s: Positive  # of mul-mats by quantised weights
    flops_float_per_s: Positive  # of mul-mats by F16, BF16 and F32 weights, and of attention
    kernel_s: NotNegative  # of one kernel on the card, beside its work
    launch_s: NotNegative  # of the caller's time for a graph
    launch_node_s: NotNegative  # of the caller's time for each kernel of it
    copy_s: NotNegative  # of one copy on the link, beside its bytes
    copy_issue_s: NotNegative  # of the caller's time to ask for a copy
    synchronize_s: NotNegative  # of the caller's time once what it waits for is done
    pinned_bytes_per_s: Positive  # of the link, from and to pinned host memory
    pageable_bytes_per_s: Positive  # from and to other host memory
    uncaptured_node_s: NotNegative = 0.0  # of the caller's time for each kernel of a graph that CUDA has not captured

    def slower(self, bytes_factor: float, flops_factor: float) -> Card:
        """The card in a machine slower in memory and link by one factor and in arithmetic by another: every rate is
        divided, every latency multiplied by bytes_factor."""
        slowed = {}
        for name in (field.name for field in fields(self)):
            if name.endswith("_per_s"):
                slowed[name] = getattr(self, name) / (flops_factor if name.startswith("flops") else bytes_factor)
            elif name.endswith("_s"):
                slowed[name] = getattr(self, name) * bytes_factor
        return replace(self, **slowed)

    def kernel_seconds(self, flop: float, n_bytes: float, in_float: bool) -> float:
        """Seconds of one kernel. libggml-emulated computes the same (native/emulated/graph.cpp)."""
        rate = self.flops_float_per_s if in_float else self.flops_per_s
        return max(flop / rate, n_bytes / self.bytes_per_s) + self.kernel_s


@dataclass(frozen=True, slots=True)
class Host:
    """The CPU and DRAM of a computer, by the rates that ggml's CPU kernels reach."""

    name: str
    bytes_per_s: Positive  # of weights in decode, all cores
    flops_per_s: Positive  # of mul-mats by quantised weights in prompts
    source: str
    flops_float_per_s: Positive | None = None  # by F16, BF16 and F32 weights; None: the same
    flops_attention_per_s: Positive | None = None  # None: as by float weights
    flops_by_type: tuple[tuple[str, Positive], ...] = ()  # of types whose kernels are slower or faster than others
    bytes_float_per_s: Positive | None = None  # of F16, BF16 and F32 weights in decode; None: the same
    kernel_s: NotNegative = 5e-6  # of one node, besides its work: all threads meet after it
    dram_bytes_per_s: Positive | None = None  # that the CPU and the link read together; None: not known

    def kernel_seconds(self, flop: float, n_bytes: float, weight_type: str | None) -> float:
        """Return the seconds of a node: a mul-mat by weights of this type; without a type, attention and the like."""
        return max(flop / self.rate_of(weight_type), n_bytes / self.bytes_rate_of(weight_type)) + self.kernel_s

    def bytes_rate_of(self, weight_type: str | None) -> float:
        """Return bytes/s of mul-mats by weights of this type; of other nodes without a type."""
        floating = self.bytes_float_per_s if weight_type in FLOAT_TYPES else None
        return floating or self.bytes_per_s

    def rate_of(self, weight_type: str | None) -> float:
        """Return flop/s of mul-mats by weights of this type; of attention without a type."""
        floating = self.flops_float_per_s or self.flops_per_s
        if weight_type is None:
            return self.flops_attention_per_s or floating
        return dict(self.flops_by_type).get(weight_type, floating if weight_type in FLOAT_TYPES else self.flops_per_s)
