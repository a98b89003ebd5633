"""Seconds of a block that is split between the CPU and the device.

Both sides compute their slices at the same time (ScheInfer III-B; Eq. 4 for the terms and Eq. 5 for their order, with
r_CG = 0). The thread that computes CC also queues the device's work, waits for the device's result and joins the two.
Queuing and waiting take it some time even where the device was done long before, so the price counts upload, queuing
and download in full, and only the computing as overlapping:

    t = upload + queue + max(t_C, t_Launch - queue + t_G) + download + join

where t_C and t_G are longer if the profile says that the two slow each other down (cost/beside.py).
A device that does nothing by itself (a second CPU backend) keeps that thread until it is done: then t_C and t_G add up.
t_C and t_G are sums over the block's mul-mats of alpha + r * (t - alpha): r is the slice's share of the weight, t the
profiled time of the whole mul-mat at this batch size, alpha what the profile says a mul-mat of no size takes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from oallama.core.errors import ProfileError
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, Operator, Profile
from oallama.cost.beside import ALONE, Beside, BesideCurve, beside_at, beside_curve, both_seconds
from oallama.cost.blocks import F32, SplitBlock, can_split, split_blocks
from oallama.cost.graph import computes_outputs_only
from oallama.cost.operator_cost import CaseIndex, Curve, Pass, Signature, index_cases, interpolate, signature
from oallama.cost.transfer import TransferRates, transfer_rates
from oallama.profile.fit import fit_linear

JOIN_BYTES = 3 * F32
"""Of memory that the join moves for each element: it reads both sides' results and writes one."""

MIN_SIZE_RATIO = 4.0
"""Of the largest to the smallest weight below which a profile says nothing of a fixed cost."""


@dataclass(frozen=True, slots=True)
class Side:
    """Seconds of mul-mats on one side, by the share of their weights that lies there."""

    fixed_s: float  # alpha, of all of them
    whole_s: float  # with all of the weights

    def seconds(self, share: float) -> float:
        return self.fixed_s + share * (self.whole_s - self.fixed_s) if share > 0 else 0.0


@dataclass(frozen=True, slots=True)
class OperatorSides:
    """One operator on both sides, for each of the passes that it takes part in."""

    layout: str  # of the host's slice: the fastest over all passes
    passes: tuple[Pass, ...]
    host: tuple[Side, ...]
    device: tuple[Side, ...]  # empty: the device cannot compute it


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """What pricing blocks needs, over a fixed list of forward passes."""

    operators: tuple[Operator, ...]
    sides: tuple[OperatorSides, ...]
    rates: TransferRates
    join_s_per_byte: float  # of memory that the CPU reads or writes
    beside: BesideCurve = ()
    blocking: bool = False  # the device computes while the thread that launches waits

    def splittable(self) -> tuple[bool, ...]:
        """For each operator, whether it can be split at all."""
        return tuple(
            can_split(operator) and len(sides.device) == len(sides.passes)
            for operator, sides in zip(self.operators, self.sides, strict=True)
        )


def pass_seconds(
    host: Side,
    device: Side,
    block: SplitBlock,
    gg: int,
    n_tokens: int,
    rates: TransferRates,
    join_s_per_byte: float,
    beside: Beside = ALONE,
    blocking: bool = False,
) -> float:
    """The formula above, for one pass over n_tokens; 0 < gg < extent elements are the device's slice."""
    share = gg / block.extent
    host_s, device_s = host.seconds(1 - share), device.seconds(share)
    launch_s = rates.launch_s
    both_s = launch_s + device_s + host_s if blocking else both_seconds(host_s, launch_s, device_s, beside)
    joined = (block.returned + block.returned_each * gg) * n_tokens * JOIN_BYTES
    return (
        rates.copy_in.seconds(block.upload_bytes(gg, n_tokens))
        + rates.launch_issue_s
        + both_s
        + rates.copy_out.seconds(block.download_bytes(gg, n_tokens))
        + joined * join_s_per_byte
    )


def block_seconds(costs: SplitCosts, block: SplitBlock, cuts: Sequence[int]) -> tuple[float, ...]:
    """Seconds over all passes of the block with each of these sizes of GG, in elements, none of them 0 or all."""
    members = [costs.sides[i] for i in block.operators]
    per_pass = [
        (one, _sum(m.host[p] for m in members), _sum(m.device[p] for m in members))
        for p, one in enumerate(members[0].passes)
    ]
    at = [beside_at(costs.beside, one.n_tokens) for one, _, _ in per_pass]
    return tuple(
        sum(
            one.count
            * pass_seconds(
                host, device, block, gg, one.n_tokens, costs.rates, costs.join_s_per_byte, beside, costs.blocking
            )
            for (one, host, device), beside in zip(per_pass, at, strict=True)
        )
        for gg in cuts
    )


def split_seconds(costs: SplitCosts, gg: Sequence[int]) -> float:
    """Seconds over all passes of every block that the split operators form. gg: as in split_blocks."""
    return sum(block_seconds(costs, b, (gg[b.operators[0]],))[0] for b in split_blocks(costs.operators, gg))


def split_costs(profile: Profile, operators: Sequence[Operator], n_layer: int, over: Sequence[Pass]) -> SplitCosts:
    """What the profile says of splitting these operators over these passes.

    Raises ProfileError if the CPU never measured an operator's shape.
    """
    index = index_cases(profile)
    fixed = fixed_costs(index)
    output_passes = tuple(replace(p, n_tokens=p.n_outputs) for p in over if p.n_outputs)
    seen: dict[tuple[Signature, bool], OperatorSides] = {}
    sides = []
    for operator in operators:
        outputs_only = computes_outputs_only(operator, n_layer)
        key = (signature(operator), outputs_only)
        if key not in seen:
            passes = output_passes if outputs_only else tuple(over)
            seen[key] = _operator_sides(index, fixed, operator, profile.device, passes)
        sides.append(seen[key])
    fastest_gb_per_s = max((case.gb_per_s for case in profile.cases if case.device == CPU_DEVICE), default=0.0)
    join_s_per_byte = 1 / (fastest_gb_per_s * 1e9) if fastest_gb_per_s else 0.0
    rates, beside = transfer_rates(profile), beside_curve(profile)
    return SplitCosts(tuple(operators), tuple(sides), rates, join_s_per_byte, beside, profile.is_blocking)


FixedCosts = Mapping[tuple[str, str, str, str], Curve]
"""(device, layout, op, type) -> alpha by batch size."""


def fixed_costs(index: CaseIndex) -> dict[tuple[str, str, str, str], Curve]:
    """What a mul-mat of no size would take: alpha of t = alpha + beta * size over the shapes of a type that were timed
    at the same batch size (ScheInfer Eq. 3), where their sizes differ enough to tell."""
    points: dict[tuple[str, str, str, str], dict[int, list[tuple[int, float]]]] = {}
    for (device, layout, (op, weight_type, (k, n, e), _)), curve in index.items():
        by_batch = points.setdefault((device, layout, op, weight_type), {})
        for n_tokens, seconds in curve:
            by_batch.setdefault(n_tokens, []).append((k * n * e, seconds))
    return {
        key: tuple((n_tokens, _alpha(measured)) for n_tokens, measured in sorted(by_batch.items()))
        for key, by_batch in points.items()
    }


def _alpha(measured: Sequence[tuple[int, float]]) -> float:
    sizes = [size for size, _ in measured]
    return fit_linear(measured).alpha_s if max(sizes) >= MIN_SIZE_RATIO * min(sizes) else 0.0


def _operator_sides(
    index: CaseIndex, fixed: FixedCosts, operator: Operator, device: str, passes: tuple[Pass, ...]
) -> OperatorSides:
    wanted = signature(operator)

    def sides(where: str, layout: str) -> tuple[Side, ...]:
        curve = index.get((where, layout, wanted))
        alphas = fixed.get((where, layout, operator.op, operator.type))
        if curve is None or alphas is None:
            return ()
        wholes = [interpolate(curve, p.n_tokens) for p in passes]
        return tuple(
            Side(min(interpolate(alphas, p.n_tokens), whole), whole) for p, whole in zip(passes, wholes, strict=True)
        )

    by_layout = {
        layout: sides(CPU_DEVICE, layout) for on, layout, known in index if on == CPU_DEVICE and known == wanted
    }
    if not by_layout:
        raise ProfileError(
            f"the profile has no CPU timing of {operator.type} {list(operator.shape)} ({operator.name}); "
            "run `oallama profile` for this model"
        )

    def seconds(layout: str) -> float:
        return sum(p.count * side.whole_s for p, side in zip(passes, by_layout[layout], strict=True))

    layout = min(sorted(by_layout), key=seconds)
    return OperatorSides(layout, passes, by_layout[layout], sides(device, DEVICE_LAYOUT))


def _sum(sides: Iterable[Side]) -> Side:
    listed = list(sides)
    return Side(sum(side.fixed_s for side in listed), sum(side.whole_s for side in listed))
