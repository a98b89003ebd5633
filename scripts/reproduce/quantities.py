"""Of each kind of figure, what the simulator gives for it, and what physics allows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from shared import InputError

from oallama.core.types import Operator
from oallama.core.units import GIB, MIB
from oallama.cost.whole import cache_bytes
from oallama.device.card import FLOAT_TYPES, Card, Host
from oallama.planner.problem import costs_of
from oallama.planner.simulate import simulate
from oallama.profile.described import non_matmul_kernels
from reproduce.figures import Figure, FigureArm, FigureCell
from reproduce.problems import ArmPrediction, Key, buffer_bytes, formulas, machine, model, problem, workload

MICRO = 1e6
PEAK_GB_PER_S = {"a": (768, 31.5), "b": (936, 31.5), "c": (616, 15.75)}
"""Vendors' GPU memory, and PCIe x16, of ScheInfer's testbeds."""


@dataclass(frozen=True)
class Found:
    """ours, variant: None if there is none. bound: what no machine of these rates passes; None: none was computed.
    lower: the bound is from below, as of a time."""

    ours: float | None
    bound: float | None = None
    lower: bool = False
    variant: float | None = None
    cells: tuple[dict[str, Any], ...] = ()


Runs = Mapping[Key, ArmPrediction | None]
TAKE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": statistics.geometric_mean,
}


def find(figure: Figure, runs: Runs) -> Found:
    """Raises InputError for a kind that there is not."""
    if figure.kind not in KINDS:
        raise InputError(f"{figure.key}: unknown kind {figure.kind!r}; choose from {', '.join(KINDS)}")
    return KINDS[figure.kind](figure, runs)


#
# speed-ups
#


def _speed_up(figure: Figure, runs: Runs) -> Found:
    """Times as fast as the baseline; of several cells the largest, the smallest or the geometric mean. Of two
    baselines, the second's own is the variant."""
    assert figure.ours is not None and figure.baseline is not None
    gains, bounds, variants, ours = [], [], [], []
    asked = [(cell, figure.baseline) for cell in figure.cells]
    asked += [(cell, figure.also[1]) for cell in figure.also[0]] if figure.also else []
    for cell, baseline in asked:
        base, own = runs[cell, baseline], runs[cell, figure.ours]
        row = {**_named(cell), "against": baseline.policy, "baseline": _predicted(base), "ours": _predicted(own)}
        ours.append(row)
        if base is None or own is None:
            continue
        base_s = base.seconds(figure.metric)
        gains.append(base_s / own.seconds(figure.metric))
        row["speed_up"] = gains[-1]
        if figure.unit == "×" and figure.ours.gpu_weights is None and figure.ours.vram_gib is None:
            bounds.append(base_s / least_seconds(cell, figure.metric))
            row["bound"] = bounds[-1]
        variant = runs[cell, figure.variant] if figure.variant else None
        if variant is not None:
            variants.append(base_s / variant.seconds(figure.metric))
        elif figure.also and baseline == figure.also[1]:
            variants.append(gains[-1])
    take = TAKE[figure.take]
    return Found(
        take(gains) if gains else None,
        take(bounds) if bounds else None,
        variant=take(variants) if variants else None,
        cells=tuple(ours),
    )


def _throughput(figure: Figure, runs: Runs) -> Found:
    """Tokens a second that an arm generates, the prompt's time counted."""
    assert figure.ours is not None
    (cell,) = figure.cells
    run = runs[cell, figure.ours]
    ours = ({**_named(cell), "ours": _predicted(run)},)
    return Found(cell.n_gen / run.total_s if run else None, cells=ours)


def _named(cell: FigureCell) -> dict[str, Any]:
    """What of it is not as usual."""
    plain = FigureCell(cell.machine, cell.model)
    return {key: value for key, value in asdict(cell).items()
            if key in ("machine", "model") or value != getattr(plain, key)}  # fmt: skip


def _predicted(run: ArmPrediction | None) -> dict[str, Any] | None:
    return None if run is None else asdict(run)


#
# physical bounds: bytes over bandwidth, and operations over arithmetic, all parts busy at once
#


def least_seconds(cell: FigureCell, metric: str) -> float:
    """Of any plan in the cell. What the card can hold lies there, what a token reads most of first; the rest is
    computed by the CPU, or copied and computed by the card, in the best proportion. No latencies, attention or
    activations."""
    ttft_s = _pass_seconds(cell, cell.n_prompt)
    if metric == "ttft":
        return ttft_s
    tpot_s = _pass_seconds(cell, 1)
    return tpot_s if metric == "tpot" else ttft_s + cell.n_gen * tpot_s


def _pass_seconds(cell: FigureCell, n_tokens: int) -> float:
    host, card = machine(cell)
    _, operators, _ = model(cell.model, cell.type)
    operators = tuple(o for o in operators if n_tokens == 1 or o.layer is not None)
    there, here = _divided(operators, _card_bytes(cell, card, operators))
    on_card_s = _seconds(there, n_tokens, card)
    by_link = sum(share * _bytes(o, n_tokens) for o, share in here) / card.pinned_bytes_per_s
    by_cpu = _seconds(here, n_tokens, host)
    beside_s = 1 / (1 / by_link + 1 / by_cpu) if by_link and by_cpu else 0.0
    return max(on_card_s, beside_s)


def _card_bytes(cell: FigureCell, card: Card, operators: Sequence[Operator]) -> float:
    memory = card.memory_bytes if cell.vram_gib is None else cell.vram_gib * GIB
    if cell.gpu_weights is None:
        return memory
    return min(memory, cell.gpu_weights * sum(operator.bytes for operator in operators))


def _divided(operators: Sequence[Operator], room: float) -> tuple[list[tuple[Operator, float]], ...]:
    """(operator, share of it) on the card and in host memory."""
    there, here = [], []
    for operator in sorted(operators, key=lambda o: -o.mul_mat.bytes_read(1) / o.bytes):
        share = min(1.0, max(0.0, room / operator.bytes))
        room -= share * operator.bytes
        there.append((operator, share))
        here.append((operator, 1 - share))
    return [one for one in there if one[1] > 0], [one for one in here if one[1] > 0]


def _seconds(parts: Sequence[tuple[Operator, float]], n_tokens: int, processor: Card | Host) -> float:
    """The larger of what reading and what computing takes."""
    read_s = sum(share * _bytes(o, n_tokens) / _rates(processor, o.type)[0] for o, share in parts)
    compute_s = sum(share * o.mul_mat.flops(n_tokens) / _rates(processor, o.type)[1] for o, share in parts)
    return max(read_s, compute_s)


def _bytes(operator: Operator, n_tokens: int) -> float:
    return operator.bytes * operator.mul_mat.share_routed(n_tokens)


def _rates(processor: Card | Host, type_name: str) -> tuple[float, float]:
    """(bytes/s, flop/s) of weights of a type."""
    if isinstance(processor, Host):
        return processor.bytes_rate_of(type_name), processor.rate_of(type_name)
    floating = type_name in FLOAT_TYPES
    return processor.bytes_per_s, processor.flops_float_per_s if floating else processor.flops_per_s


#
# single operators, sizes
#


def _operator(figure: Figure, _runs: Runs) -> Found:
    """Microseconds of a mul-mat (the mean, the shortest or the longest of those of a model's layers and output), or of
    another operator of a layer; for a mul-mat with the time that its bytes take at the card's peak."""
    cell = figure.cells[0]
    host, card = machine(cell)
    on_card = figure.of["side"] == "gpu"
    role, n_tokens = figure.of["role"], cell.n_prompt

    def seconds(flop: float, n_bytes: float, type_name: str | None) -> float:
        if on_card:
            return card.kernel_seconds(flop, n_bytes, type_name is None or type_name == "F16")
        return host.kernel_seconds(flop, n_bytes, type_name)

    if role != "mul-mat":
        kernels = list(non_matmul_kernels(_non_matmul_shape(cell), n_tokens, n_tokens, 0))
        kernel = kernels[OTHER_OPERATORS[role]]
        return Found(MICRO * seconds(kernel.flop, kernel.n_bytes, None))
    _, operators, _ = model(cell.model, cell.type)
    take = statistics.fmean if figure.take == "mean" else TAKE[figure.take]
    ours, least = [], []
    for operator in operators:
        tokens = 1 if operator.layer is None else n_tokens
        mul_mat = operator.mul_mat
        k, n, _ = mul_mat.shape
        moved = 4 * tokens * (k + n)
        ours.append(seconds(mul_mat.flops(tokens), mul_mat.bytes_read(tokens) + moved, mul_mat.type))
        if on_card:
            least.append(mul_mat.bytes / figure.of["peak_bytes_per_s"])
    return Found(MICRO * take(ours), MICRO * take(least) if least else None, lower=True)


OTHER_OPERATORS = {"norm": 0, "softmax": 7, "mul": -3, "add": -1}
"""Index into non_matmul_kernels: norms first, then rope, the KV write, attention without flash attention in four steps,
the gated product, and the residual adds. OATO's `mul` is taken for the gated product."""


def _non_matmul_shape(cell: FigureCell) -> Any:
    """Without flash attention, which has no softmax of its own."""
    profile = _profile(cell)
    return next(case.shape for case in profile.rest if case.shape is not None and not case.shape.flash_attn)


@cache
def _profile(cell: FigureCell) -> Any:
    from oallama.profile.described import described

    info, operators, _ = model(cell.model, cell.type)
    return described(*machine(cell), info, operators, (1, 512))


def _memory(figure: Figure, _runs: Runs) -> Found:
    """MiB of a model's weights, of its KV cache at a context, or of buffers; or the share of weights in all three, or
    of weights within layers in them, in per cent."""
    cell = figure.cells[0]
    info, operators, _ = model(cell.model, cell.type)
    linear = sum(operator.bytes for operator in operators if operator.layer is not None)
    made = {
        "weights": (sum(operator.bytes for operator in operators) + _embedding_bytes(operators)) / MIB,
        "kv": info.n_layer * (cell.n_ctx or 0) * cache_bytes(_non_matmul_shape(cell)) / MIB,
        "other": buffer_bytes(info, cell.n_ubatch) / MIB,
    }
    whole = sum(made.values())
    return Found(
        {**made, "share": 100 * made["weights"] / whole, "linear": 100 * linear / MIB / whole}[figure.of["part"]]
    )


def _embedding_bytes(operators: Sequence[Operator]) -> int:
    """The output matrix's: both have one row a token of the vocabulary."""
    return next(operator.bytes for operator in operators if operator.layer is None)


def _affinity(figure: Figure, _runs: Runs) -> Found:
    """G of a role (section 2.3): B = (T_c - T_g) / M of every mul-mat, scaled to 0..1 over the model."""
    cell = figure.cells[0]
    asked = problem(cell, FigureArm("oato"))
    load = workload(cell)
    costs = costs_of(asked, load, "prefill").operators
    gains = [
        (cost.t_cpu_s - (cost.t_gpu_s or 0.0)) / operator.bytes
        for cost, operator in zip(costs, asked.operators, strict=True)
        if operator.layer is not None
    ]
    roles = [operator.role for operator in asked.operators if operator.layer is not None]
    index = roles.index(figure.of["role"])
    return Found((gains[index] - min(gains)) / (max(gains) - min(gains)))


#
# ScheInfer's formulas, Table I, HeteGen's streams
#


def _rate(figure: Figure, _runs: Runs) -> Found:
    """GB/s that a beta of ScheInfer's Table I is, the preset's beside it; bound: the hardware's peak. Or µs of an
    alpha."""
    part, cell = figure.of["part"], figure.cells[0]
    host, card = machine(cell)
    if figure.unit == "µs":
        alphas = {"gpu": card.kernel_s, "cpu": host.kernel_s, "link": card.copy_s, "launch": card.launch_s}
        return Found(MICRO * alphas[part])
    memory, link = PEAK_GB_PER_S[cell.machine[-1]]
    ours = {"gpu": card.bytes_per_s, "cpu": host.bytes_rate_of(cell.type), "link": card.pinned_bytes_per_s}[part]
    return Found(ours / 1e9, {"gpu": memory, "link": link}.get(part))


def _law(figure: Figure, _runs: Runs) -> Found:
    """HeteGen's Eq. 6: what computing on the CPU beside copies gains over copies alone, 1 + V_CPU / V_COM; or the
    quotient itself."""
    host, card = machine(figure.cells[0])
    return Found(figure.of["plus"] + host.bytes_per_s / card.pinned_bytes_per_s)


def _formulas(figure: Figure, _runs: Runs) -> Found:
    """A number out of the document; `bound` beside it where there is one. Where the paper does not say which CPU, both
    that Table I has and that the published rates imply are there."""
    params = dict(figure.of)
    part, value = params.pop("part"), params.pop("value", "predicted")
    if part == "fixed_means":
        means = formulas()[part]
        return Found(means["by_fixed_rate"][params["index"]])
    rows = formulas()[part]
    rows = rows[params.pop("cpu")] if isinstance(rows, dict) else rows
    row = next(row for row in rows if all(row[key] == wanted for key, wanted in params.items()))
    return Found(row[value], row.get("bound"))


def _busy(figure: Figure, runs: Runs) -> Found:
    """Share of an FFN block's time that a stream works, in per cent: of the token that is drawn, from the first work of
    the block's streams to its join's end. Everything is cut, as in the paper's breakdown."""
    assert figure.ours is not None
    cell = figure.cells[0]
    made = _simulated(cell, figure.ours)
    layer = model(cell.model, cell.type)[0].n_layer // 2
    name = f"layer {layer}: FFN"
    works = [work for work in made.token.activities if work.name == name]
    cpu = [work for work in works if work.stream == "cpu"]
    start, end = min(work.start_s for work in cpu), max(work.end_s for work in cpu)
    stream = {"cpu": "cpu", "io": "in", "gpu": "gpu"}[figure.of["stream"]]
    busy = sum(
        max(0.0, min(work.end_s, end) - max(work.start_s, start))
        for work in made.token.activities
        if work.stream == stream
    )
    bound = None
    if stream == "gpu":  # it reads what the link brings
        _, card = machine(cell)
        bound = 100 * figure.of["io_per_cent"] / 100 * card.pinned_bytes_per_s / figure.of["peak_bytes_per_s"]
    return Found(100 * busy / (end - start), bound, lower=True)


def _simulated(cell: FigureCell, arm: FigureArm) -> Any:
    from oallama.planner.decide import decide, policy_named
    from oallama.planner.policies.registry import Request, Rules

    asked, rules = problem(cell, arm), Rules(prefetch=arm.prefetch)  # type: ignore[arg-type]
    made = decide([asked], Request(workload(cell), policy_named(arm.policy), rules=rules))
    return simulate(asked, made.workload, made.placement)


def _none(_figure: Figure, _runs: Runs) -> Found:
    return Found(None)


KINDS: Mapping[str, Callable[[Figure, Runs], Found]] = {
    "speed-up": _speed_up,
    "throughput": _throughput,
    "operator": _operator,
    "memory": _memory,
    "affinity": _affinity,
    "rate": _rate,
    "law": _law,
    "formulas": _formulas,
    "busy": _busy,
    "not simulated": _none,
}
