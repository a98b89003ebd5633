"""Performance models of ScheInfer (section IV-A, Eq. 3) from a profile: t = α + β·n for every resource.

A resource is a kernel on a device, in a layout, for a ggml type, at one batch size. There the workload T·M·H of the
paper is proportional to the weight bytes that are read, so n is bytes, and LinearFit serves kernels and links alike.
One line over all batch sizes, as in the paper's Table I, would mix two regimes: memory limits one token, arithmetic
limits hundreds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oallama.core.errors import ProfileError
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, LinearFit, Operator, Profile
from oallama.core.units import KIB
from oallama.cost.blocks import SplitBlock
from oallama.cost.operator_cost import CaseIndex, Curve, Signature, index_cases, signature
from oallama.cost.slice_times import NO_GAP, Gemm, StreamedBlock, StreamRates
from oallama.cost.split_ffn import FixedCosts, SplitCosts, fixed_costs
from oallama.profile.cases import bytes_read, case_of
from oallama.profile.fit import fit_linear
from oallama.profile.wanted import signature_of

NO_ALPHA: Curve = ((1, 0.0),)

WEIGHT_COPY_BYTES = 256 * KIB
"""Copies of weights are from here on as large as that. What a line over all sizes makes of them is off by as much as
caches are faster than memory: on a local RPC worker 64 KiB pass at 20 GB/s, 4 MiB at 2."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What a line is fitted for."""

    device: str
    layout: str
    op: str  # MUL_MAT or MUL_MAT_ID
    type: str
    n_tokens: int


def resource_lines(profile: Profile) -> dict[Resource, LinearFit]:
    """Eq. 3 for every resource that was timed at two sizes or more: seconds over weight bytes read, with r2. Of cases
    that differ in working set only, the coldest counts."""
    points: dict[Resource, dict[Signature, tuple[int, float]]] = {}
    for case in sorted(profile.cases, key=lambda case: case.working_set_bytes):
        resource = Resource(case.device, case.layout, case.op, case.type, case.n_tokens)
        n_bytes = round(bytes_read(case_of(case).signature, case.n_tokens))
        points.setdefault(resource, {})[signature(case)] = (n_bytes, case.seconds)
    return {
        resource: fit_linear(tuple(known.values()))
        for resource, known in points.items()
        if len({n_bytes for n_bytes, _ in known.values()}) > 1
    }


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """What the profile says of mul-mats: whole weights by batch size, and what a mul-mat of no size would take."""

    whole: CaseIndex
    fixed: FixedCosts
    device: str

    def layouts(self, operators: Sequence[Operator]) -> tuple[str, ...]:
        """CPU layouts in which all of these operators were timed, in alphabetical order."""
        known = [
            {layout for on, layout, sig in self.whole if on == CPU_DEVICE and sig == signature(o)} for o in operators
        ]
        return tuple(sorted(set.intersection(*known))) if known else ()

    def gemm(self, operator: Operator, layout: str) -> Gemm:
        """layout: of CC. Raises ProfileError where either side was not timed at this shape."""
        cpu, cpu_alpha = self._curves(CPU_DEVICE, layout, operator)
        gpu, gpu_alpha = self._curves(self.device, DEVICE_LAYOUT, operator)
        return Gemm(signature_of(operator), cpu, cpu_alpha, gpu, gpu_alpha)

    def _curves(self, device: str, layout: str, operator: Operator) -> tuple[Curve, Curve]:
        whole = self.whole.get((device, layout, signature(operator)))
        if whole is None:
            raise ProfileError(
                f"the profile has no timing of {operator.type} {list(operator.shape)} ({operator.name}) on {device} in "
                f"layout {layout}; run `oallama profile` for this model"
            )
        return whole, self.fixed.get((device, layout, operator.op, operator.type), NO_ALPHA)


def kernel_times(profile: Profile) -> KernelTimes:
    index = index_cases(profile)
    return KernelTimes(index, fixed_costs(index), profile.device)


def streamed_block(
    kernels: KernelTimes, operators: Sequence[Operator], block: SplitBlock, layout: str, gap: Curve = NO_GAP
) -> StreamedBlock:
    """A block with its costs, CC in this layout. operators: the model's, which block.operators indexes. Raises
    ProfileError where one of its mul-mats was not timed on both sides."""
    return StreamedBlock(block, tuple(kernels.gemm(operators[i], layout) for i in block.operators), layout, gap)


def stream_rates(costs: SplitCosts, link: Mapping[str, LinearFit], pinned: bool = True) -> StreamRates:
    """What sending, joining and streaming cost. pinned: CG lies in pinned memory; pageable memory is what is left where
    the device has none. Raises ProfileError where no link was measured."""
    weights = link.get("h2d_pinned" if pinned else "h2d_pageable") or link.get("h2d_pageable")
    if weights is None:
        raise ProfileError("the profile has no link to a device; run `oallama profile` with --device")
    issue = link.get("issue_pinned" if pinned and "h2d_pinned" in link else "issue_pageable")
    return StreamRates(
        _large(weights),
        costs.rates,
        costs.join_s_per_byte,
        blocking=costs.blocking,
        issue=_large(issue) if issue else None,
        beside=costs.beside,
    )


def _large(line: LinearFit) -> LinearFit:
    """The line of large copies, where enough of them were measured."""
    points = [(n_bytes, seconds) for n_bytes, seconds in line.points if n_bytes >= WEIGHT_COPY_BYTES]
    return fit_linear(points) if len(points) > 2 else line
