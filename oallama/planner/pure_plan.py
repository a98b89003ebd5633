"""Planning problems without the machine: from a model's header, a profile, options and memory alone. Pure.

Uses no device, no load and no file. `oallama simulate`, `what-if` and the corpus of plans (tests/golden/corpus) plan
for described machines with it. `what_if` compares stock llama.cpp's fastest options with our best plan. As there is no
load on the card, KV cache and compute buffers are those of a no_alloc load on the CPU: compute buffers of the same
size, the KV cache in proportion to the layers on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from oallama.core.errors import DoesNotFit
from oallama.core.ggml_types import bytes_per_element
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import Attention, FlashAttention, Operator, Workload
from oallama.core.units import KIB
from oallama.device.card import Card
from oallama.planner.attention import AttentionRule, ModelHeader, Problems, problem_of
from oallama.planner.decide import decide
from oallama.planner.placement import Placement, VerifiedPlan, whole_bytes
from oallama.planner.policies.ranges import on_each, ranges
from oallama.planner.policies.registry import Policy, Request
from oallama.planner.policies.stock import fastest_stock
from oallama.planner.policies.stock_devices import stock_over_devices
from oallama.planner.problem import LoadBytes, NoAllocLoad, Problem
from oallama.planner.verify import on_cpu


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A prediction for one card, or for several cards in one machine, whose plans use one of them or all."""

    cards: tuple[Card, ...]
    stock: VerifiedPlan  # the fastest options of stock llama.cpp, policy being their name
    best: VerifiedPlan  # the same one where nothing is predicted to be faster; or the plan of the policy asked for
    stock_cards: tuple[int, ...]  # the numbers of the cards that it uses
    best_cards: tuple[int, ...]

    @property
    def name(self) -> str:
        return "+".join(card.name for card in self.cards)

    @property
    def memory_bytes(self) -> int:
        return sum(card.memory_bytes for card in self.cards)

    @property
    def fits_whole(self) -> bool:
        return all(self.stock.placement.on_device)

    @property
    def gain(self) -> float:
        """Speed of the best plan relative to stock, over the workload."""
        return self.stock.predicted.total_s / self.best.predicted.total_s


def estimated_device_load(
    host: LoadBytes, operators: Sequence[Operator], n_layer: int, memory_bytes: int
) -> NoAllocLoad:
    """The estimated no_alloc load on a described card with memory_bytes of free memory. Norms and biases count as 0
    bytes there."""

    def no_alloc_load(workload: Workload, placement: Placement) -> LoadBytes:
        on_card = whole_bytes(operators, placement.on_device)
        n_layers = max(0, n_layer - placement.first_device_layer)
        return LoadBytes(
            weights_gpu=on_card,
            weights_host=host.weights_host - on_card,
            kv=host.kv * n_layers // n_layer,
            compute=host.compute if placement.llama_uses_device(n_layer) else 0,
            device_free=memory_bytes,
        )

    return no_alloc_load


def problem_over(devices: Sequence[Problem], host: LoadBytes) -> Problem:
    """The problem over several cards with estimated no_alloc loads, from a problem for each card. host: as in
    estimated_device_load."""
    first = devices[0]

    def no_alloc_load(workload: Workload, placement: Placement) -> LoadBytes:
        if not placement.device_layers:
            return first.no_alloc_load(workload, placement)
        slice_bytes = [slices.device_bytes for slices in placement.device_slices]  # which no load counts
        device_loads = tuple(
            LoadBytes(n_bytes - other, 0, host.kv * n_layers // first.graph.n_layer, host.compute, device.vram or 0)
            for device, (n_layers, n_bytes), other in zip(devices, on_each(first, placement), slice_bytes, strict=True)
        )
        on_cards = sum(device.weights_gpu for device in device_loads)
        return LoadBytes(on_cards, host.weights_host - on_cards, host.kv, host.compute, 0, device_loads)

    return replace(first, no_alloc_load=no_alloc_load, devices=tuple(devices))


def what_if(problem: Problem, card: Card, workload: Workload, policy: Policy | None = None) -> WhatIf:
    """The plans of stock llama.cpp and of oallama for a card. problem: with the card's described profile, and
    estimated_device_load. policy: the policy to compare with stock's fastest options (on the CPU if it does not fit);
    None: the faster of auto's and stock's."""
    stock = best = fastest_stock(problem, Request(workload, quick=True, required=False))
    if policy is not None or not all(stock.placement.on_device):
        try:
            best = decide([problem], Request(workload, policy, quick=True))
        except DoesNotFit:
            best = on_cpu(problem, workload, "mixed")
        best = min(stock, best, key=total_s) if policy is None else best
    return WhatIf((card,), stock, best, (0,), (0,))


def what_if_over(problem: Problem, cards: tuple[Card, ...], workload: Workload) -> WhatIf:
    """The plans of stock llama.cpp and of oallama for several cards: the fastest on one card alone or over all.
    problem: over all (problem_over)."""
    what_ifs = [what_if(device, card, workload) for device, card in zip(problem.devices, cards, strict=True)]
    stocks: list[tuple[VerifiedPlan, tuple[int, ...]]] = [
        (single.stock, (number,)) for number, single in enumerate(what_ifs)
    ]
    if (joint_stock := stock_over_devices(problem, workload)) is not None:
        stocks.append((joint_stock, joint_stock.placement.devices_used))
    stock, stock_cards = min(stocks, key=lambda candidate: total_s(candidate[0]))
    bests = [(stock, stock_cards), *((single.best, (number,)) for number, single in enumerate(what_ifs))]
    with suppress(DoesNotFit):  # each of them keeps buffers of its own
        ours = decide([problem], Request(workload, ranges, quick=True))
        bests.append((ours, ours.placement.devices_used))
    best, best_cards = min(bests, key=lambda candidate: total_s(candidate[0]))
    return WhatIf(cards, stock, best, stock_cards, best_cards)


def total_s(verified: VerifiedPlan) -> float:
    return verified.predicted.total_s


COMPUTE_BYTES_PER_TOKEN = 512 * KIB
"""Estimated bytes of a context's buffers per token of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a described machine. device_bytes: free on the device. host_copies_limit: host memory for second copies
    of weights. on_host: the load of a workload on the CPU alone; None: estimated from the header (estimated_load)."""

    device_bytes: int
    host_copies_limit: int
    on_host: Callable[[Workload, Attention], LoadBytes] | None = None


def pure_problems(
    header: ModelHeader, profile: Profile, options: Options, memory: Memory, routing: Routing | None = None
) -> Problems:
    """The problems for all attention modes, with estimated no_alloc loads."""
    problem_for = partial(pure_problem, header, profile, options, memory, routing=routing)
    return Problems(AttentionRule(header.model, options), profile, problem_for)


def pure_problem(
    header: ModelHeader,
    profile: Profile,
    options: Options,
    memory: Memory,
    flash_attn: FlashAttention,
    routing: Routing | None = None,
) -> Problem:
    """The problem for one attention mode, with estimated no_alloc loads."""
    attention = AttentionRule(header.model, options).attention(flash_attn)

    def no_alloc_load(workload: Workload, placement: Placement) -> LoadBytes:
        host = memory.on_host(workload, attention) if memory.on_host else estimated_load(header, workload, attention)
        return estimated_device_load(host, header.operators, header.model.n_layer, memory.device_bytes)(
            workload, placement
        )

    return problem_of(header, options, profile, flash_attn, no_alloc_load, memory.host_copies_limit, routing)


def estimated_load(header: ModelHeader, workload: Workload, attention: Attention) -> LoadBytes:
    """Estimated bytes of a load on the CPU alone: operators, a KV cache of full attention in every layer, and compute
    buffers in proportion to the micro-batch, without flash attention also for the scores."""
    model = header.model
    keys = model.n_embd_head_k * bytes_per_element(attention.type_k)
    values = model.n_embd_head_v * bytes_per_element(attention.type_v)
    compute = COMPUTE_BYTES_PER_TOKEN * workload.largest_batch
    if attention.flash_attn == "off":
        compute += 4 * workload.n_ctx * workload.largest_batch * model.n_head
    return LoadBytes(
        weights_gpu=0,
        weights_host=sum(operator.bytes for operator in header.operators),
        kv=int(workload.n_ctx * model.n_layer * model.n_head_kv * (keys + values)),
        compute=compute,
        device_free=0,
    )
