"""Blocks and machines for tests of the slicing solver: chosen, and drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from oallama.core.profile import LinearFit
from oallama.core.types import MulMat, StreamSettings
from oallama.cost.blocks import SplitBlock
from oallama.cost.kernels import Curve, Kernel
from oallama.cost.rates import NO_INTERFERENCE, NO_TRANSFER, Interference, SliceRates, TransferRates
from oallama.cost.slices import Around, BlockType, Cut, Gemm, Gemms, Pricing
from oallama.place.cutting import best_cg

TOKENS = (1, 32, 512)


def curve(seconds: float, per_token: float) -> Curve:
    """A token takes `seconds`, each further one a share of it."""
    return tuple((n, seconds * (1 + (n - 1) * per_token)) for n in TOKENS)


def gemm(
    cpu_s: float,
    gpu_s: float,
    alpha_s: float = 0.0,
    n_bytes: int = 1_000_000,
    experts: tuple[int, int] | None = None,
    k: int = 256,
    n: int = 1024,
    per_token: float = 0.05,
) -> Gemm:
    """One mul-mat; experts: (all, used)."""
    e, used = experts or (1, 1)
    mul_mat = MulMat("MUL_MAT_ID" if experts else "MUL_MAT", "Q4_0", (k, n, e), used)
    alpha = ((1, alpha_s),)
    return Gemm(mul_mat, n_bytes, Kernel(curve(cpu_s, per_token), alpha), Kernel(curve(gpu_s, per_token / 2), alpha))


def streamed(gemms: list[Gemm], extent: int = 1024, step: int = 32, gap_s: float = 0.0, first: int = 0) -> BlockType:
    n_bytes = sum(g.bytes for g in gemms)
    block = SplitBlock(tuple(range(first, first + len(gemms))), extent, step, n_bytes, 256, 0, 256, 0, 3)
    return BlockType(block, Gemms(gemms), "CPU", Around(((1, gap_s), (512, 10 * gap_s))))


def machine(
    link_s_per_byte: float = 1e-9,
    streaming: StreamSettings = StreamSettings(2, "ahead"),  # noqa: B008 - frozen
    beside: Interference = NO_INTERFERENCE,
    transfer: TransferRates = NO_TRANSFER,
    alpha_s: float = 0.0,
) -> Pricing:
    link = LinearFit(alpha_s, link_s_per_byte, 1.0)
    return Pricing(SliceRates(link, transfer, 0.0, interference=((1, beside),)), streaming)


def solve_cg(of: BlockType, on: Pricing, gg: int, n_tokens: int = 1) -> tuple[Cut, float]:
    """The best CC and CG in passes over so many tokens."""
    return best_cg(of, gg, lambda cut: on.seconds(of, cut, n_tokens))


SECONDS = st.floats(1e-5, 1e-2)
SMALL = st.one_of(st.just(0.0), st.floats(1e-6, 1e-4))
GEMMS = st.builds(
    gemm, SECONDS, SECONDS, SMALL, st.integers(10_000, 10_000_000), st.sampled_from([None, None, (8, 2)]),
    per_token=st.floats(0.001, 0.9),
)  # fmt: skip
STREAMED = st.builds(
    streamed, st.lists(GEMMS, min_size=1, max_size=3), st.sampled_from([320, 1024, 1000, 1376]),
    st.sampled_from([32, 64, 256]), SMALL,
)  # fmt: skip
PREFETCH = st.builds(StreamSettings, st.sampled_from([1, 2, 4]), st.sampled_from(["layer", "ahead"]))
FITS = st.builds(LinearFit, SMALL, st.floats(1e-11, 1e-8), st.just(1.0))
TRANSFERS = st.builds(TransferRates, FITS, FITS, SMALL)


SHARES = st.floats(0.2, 1.0)
INTERFERENCE = st.builds(Interference, *[SHARES] * 6)
SHARED_DRAM = st.builds(lambda cpu, link: Interference(cpu_with_link=cpu, link_with_cpu=link), SHARES, SHARES)
MACHINES = st.builds(machine, st.floats(1e-11, 1e-8), PREFETCH, st.just(NO_INTERFERENCE), TRANSFERS, SMALL)
SHARED_MACHINES = st.builds(machine, st.floats(1e-11, 1e-8), PREFETCH, SHARED_DRAM, TRANSFERS, SMALL)
