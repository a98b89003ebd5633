"""Physical bounds: bytes over bandwidth, and operations over arithmetic, all parts busy at once."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.types import Operator
from oallama.core.units import GIB
from oallama.device.card import FLOAT_TYPES, Card, Host
from reproduce.figures import FigureCell
from reproduce.settings import machine, model


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
    on_card_s = _seconds(there, n_tokens, card.bytes_per_s, card)
    by_link = sum(share * o.mul_mat.bytes_read(n_tokens) for o, share in here) / card.pinned_bytes_per_s
    by_cpu = _seconds(here, n_tokens, host.bytes_per_s, host)
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


def _seconds(
    parts: Sequence[tuple[Operator, float]], n_tokens: int, bytes_per_s: float, processor: Card | Host
) -> float:
    """The larger of what reading and what computing takes."""
    n_bytes = sum(share * o.mul_mat.bytes_read(n_tokens) for o, share in parts)
    compute_s = sum(share * o.mul_mat.flops(n_tokens) / _flops_per_s(processor, o.type) for o, share in parts)
    return max(n_bytes / bytes_per_s, compute_s)


def _flops_per_s(processor: Card | Host, type_name: str) -> float:
    if isinstance(processor, Host):
        return processor.rate_of(type_name)
    return processor.flops_float_per_s if type_name in FLOAT_TYPES else processor.flops_per_s
