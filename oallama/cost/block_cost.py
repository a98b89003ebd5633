"""A block that can be cut, and what its mul-mats cost: a slice takes α and its share of the rest (ScheInfer, Eq. 3)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from oallama.core.profile import LinearFit
from oallama.core.types import MulMat, Operator
from oallama.cost.blocks import SplitBlock
from oallama.cost.experts import ExpertUse
from oallama.cost.kernels import NO_TIME, Curve, Kernel, Kernels


class Cut(NamedTuple):
    """A block's slices, elements along its axis."""

    cc: int
    cg: int
    gg: int
    n_hot: int = 0  # experts that the device has whole, the most used ones; CC is all there is then

    @property
    def extent(self) -> int:
        return self.cc + self.cg + self.gg

    @property
    def is_whole(self) -> bool:
        """Nothing of it is on the device, or goes there."""
        return self.cg == self.gg == self.n_hot == 0


@dataclass(frozen=True, slots=True)
class Gemm:
    """One mul-mat of a block on either side."""

    mul_mat: MulMat
    bytes: int  # of the whole weight
    cpu: Kernel
    gpu: Kernel

    @property
    def routed(self) -> bool:
        return self.mul_mat.op == "MUL_MAT_ID"


@dataclass(frozen=True, slots=True)
class Lines:
    """What a share of mul-mats takes with one number of tokens: α whatever the share, and its part of the rest (Eq. 4);
    bytes and copies of it where it is streamed."""

    cpu_alpha_s: float
    cpu_rest_s: float
    gpu_alpha_s: float
    gpu_rest_s: float
    bytes: float  # of the whole, that these tokens read
    n_copies: float  # of any share: one, of experts one for each that is routed to


NOTHING = Lines(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Gemms(tuple[Gemm, ...]):
    """Mul-mats that are cut alike, one after the other. What they take is added up once for each number of tokens;
    no share of them, or no token, takes nothing. Compared by identity: blocks of one type share an object."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @cached_property
    def routed(self) -> bool:
        """Whether the weights that are needed are known only once the router has run."""
        return any(gemm.routed for gemm in self)

    @cached_property
    def _known(self) -> dict[int, Lines]:
        return {}

    def at(self, n_tokens: int) -> Lines:
        """n_tokens: at least one."""
        if n_tokens not in self._known:
            cpu, gpu = [gemm.cpu.at(n_tokens) for gemm in self], [gemm.gpu.at(n_tokens) for gemm in self]
            read = [gemm.mul_mat.share_routed(n_tokens) for gemm in self]
            self._known[n_tokens] = Lines(
                sum(alpha_s for alpha_s, _ in cpu), sum(rest_s for _, rest_s in cpu),
                sum(alpha_s for alpha_s, _ in gpu), sum(rest_s for _, rest_s in gpu),
                sum(gemm.bytes * share for gemm, share in zip(self, read, strict=True)),
                sum(g.mul_mat.shape[2] * share if g.routed else 1.0 for g, share in zip(self, read, strict=True)),
            )  # fmt: skip
        return self._known[n_tokens]

    def cpu_s(self, share: float, n_tokens: int) -> float:
        lines = self._lines(share, n_tokens)
        return lines.cpu_alpha_s + share * lines.cpu_rest_s

    def gpu_s(self, share: float, n_tokens: int) -> float:
        lines = self._lines(share, n_tokens)
        return lines.gpu_alpha_s + share * lines.gpu_rest_s

    def read_bytes(self, share: float, n_tokens: int) -> float:
        """Of the share of the weights, what n_tokens tokens need."""
        return share * self._lines(share, n_tokens).bytes

    def n_copies(self, share: float, n_tokens: int) -> float:
        """In which that is copied."""
        return self._lines(share, n_tokens).n_copies

    def copy_s(self, line: LinearFit, share: float, n_tokens: int) -> float:
        """Of these copies, one after the other."""
        return self.n_copies(share, n_tokens) * line.alpha_s + self.read_bytes(share, n_tokens) * line.beta_s_per_byte

    def _lines(self, share: float, n_tokens: int) -> Lines:
        return self.at(n_tokens) if share > 0 and n_tokens > 0 else NOTHING


@dataclass(frozen=True, eq=False)
class Around:
    """What surrounds blocks: curves of seconds by batch size. Compared by identity: blocks in equal surroundings share
    an object."""

    gap: Curve = NO_TIME  # from the join before to this block's inputs: attention, norms, crossings; the mean of all
    gap_cpu: Curve = NO_TIME  # of these, in which the CPU works
    whole: Curve | None = None  # as llama.cpp runs the block on the host; None: as the gemms say
    offload: Curve = NO_TIME  # of `whole`, in which llama.cpp copies the weights to the device
    resident: bool = False  # the block's inputs and results are in the device's memory
    away: Curve = NO_TIME  # of such a block: what llama.cpp's crossings take where it stays whole

    @cached_property
    def held(self) -> Around:
        """In the split back end even where nothing of the block is on the device."""
        return self if self.whole is None else replace(self, whole=None)


@dataclass(frozen=True, slots=True)
class BlockCost:
    """A block, what its mul-mats cost, and what surrounds it."""

    block: SplitBlock
    gemms: Gemms
    layout: str = "CPU"  # host buffer type of CC, which the gemms' CPU times are of
    around: Around = Around()
    gap_share: float = 1.0  # of the gap, what lies before this very block
    outputs_only: bool = False  # behind the last attention: of a prompt it sees only tokens whose logits are wanted
    takes_n_g: bool = True  # CC may be streamed for some tokens: it is held in the plain layout too
    use: ExpertUse | None = None  # of the layer's experts, which the device may have some of; None: it may not

    def __post_init__(self) -> None:
        if not isinstance(self.gemms, Gemms):
            object.__setattr__(self, "gemms", Gemms(self.gemms))

    @property
    def same(self) -> Hashable:
        """Equal for blocks that cost the same."""
        return self.gemms, self.around, self.use

    def held(self) -> BlockCost:
        """In the split back end even where nothing of it is on the device."""
        return replace(self, around=self.around.held)

    @property
    def n_expert(self) -> int:
        return self.gemms[0].mul_mat.shape[2]

    def weight_bytes(self, cut: Cut) -> int:
        """Of GG, or of whole experts, on the device."""
        if cut.n_hot:
            return sum(gemm.bytes // self.n_expert for gemm in self.gemms) * cut.n_hot
        return self.block.weight_bytes(cut.gg)

    def hot(self, n_hot: int) -> SplitBlock:
        """The block as the device computes it that has so many experts whole."""
        n_used = self.gemms[0].mul_mat.n_expert_used
        return self.block.with_rows(min(n_used, n_hot), n_used)

    @property
    def routed(self) -> bool:
        """Whether the weights that are needed are known only once the router has run."""
        return self.gemms.routed


def block_costs(kernels: Kernels, operators: Sequence[Operator], block: SplitBlock) -> dict[str, BlockCost]:
    """A block by CPU layout of CC, in alphabetical order: the layouts in which all its mul-mats were timed. Empty where
    the device cannot compute one of them. Raises ProfileError where the CPU was not timed."""
    members = [operators[i] for i in block.operators]
    on_device = [kernels.on_device(operator) for operator in members]
    on_host = [kernels.on_host(operator) for operator in members]
    layouts = sorted(set.intersection(*map(set, on_host)))
    return {
        layout: BlockCost(
            block,
            Gemms(
                Gemm(operator.mul_mat, operator.bytes, cpu[layout], gpu)
                for operator, cpu, gpu in zip(members, on_host, on_device, strict=True)
                if gpu is not None
            ),
            layout,
        )
        for layout in layouts
        if None not in on_device
    }
