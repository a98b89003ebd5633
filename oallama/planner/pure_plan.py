"""Planning problems without the machine: from a model's header, a profile, options and memory alone. Pure.

No device, no load and no file is touched. What `oallama simulate` and `what-if` plan for a described machine, and what
the corpus of plans (tests/golden/corpus) is made by. `what_if` compares stock llama.cpp's fastest options with our best
plan: its memory breakdown has no load on the card behind it, so KV cache and compute buffers are those of a no_alloc
load on the CPU; the card's compute buffers are taken to be as large, its KV cache in proportion to the layers there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from oallama.core.errors import DoesNotFit
from oallama.core.ggml_types import bytes_per_element
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import Attention, FlashAttention, ModelInfo, Operator, Workload
from oallama.core.units import KIB
from oallama.cost.graph import Graph
from oallama.device.card import Card
from oallama.planner.attention import AttentionRule, Problems, with_attention
from oallama.planner.decide import decide
from oallama.planner.placement import Placement, VerifiedPlan, whole_bytes
from oallama.planner.policies.registry import Policy, Request
from oallama.planner.policies.stock import strongest
from oallama.planner.problem import LoadBytes, NoAllocLoad, Problem
from oallama.planner.verify import on_cpu


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Prediction for one card."""

    card: Card
    stock: VerifiedPlan  # the fastest options of stock llama.cpp, policy being their name
    best: VerifiedPlan  # the same one where nothing is predicted to be faster; or the plan of the policy asked for

    @property
    def fits_whole(self) -> bool:
        return all(self.stock.placement.on_device)

    @property
    def gain(self) -> float:
        """How many times faster the best is over the workload."""
        return self.stock.predicted.total_s / self.best.predicted.total_s


def counted_load_of(host: LoadBytes, operators: Sequence[Operator], n_layer: int, memory_bytes: int) -> NoAllocLoad:
    """Probe of a card with so much free memory. Norms and biases are taken to weigh nothing there."""

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


def what_if(problem: Problem, card: Card, workload: Workload, policy: Policy | None = None) -> WhatIf:
    """Both plans for a card. problem: with the card's described profile, and counted_load_of. policy: whose plan is
    compared with stock's fastest options, or leaves everything on the CPU where it does not fit; None: the faster."""
    stock = strongest(problem, Request(workload, quick=True, required=False))
    asked = Request(workload, policy, quick=True)
    if policy is not None:
        try:
            return WhatIf(card, stock, decide([problem], asked))
        except DoesNotFit:
            return WhatIf(card, stock, on_cpu(problem, workload, "mixed"))
    if all(stock.placement.on_device):
        return WhatIf(card, stock, stock)
    ours = decide([problem], asked)
    return WhatIf(card, stock, min(stock, ours, key=lambda decision: decision.predicted.total_s))


COMPUTE_BYTES_PER_TOKEN = 512 * KIB
"""Bytes of a context's buffers for each token of a micro-batch, where no load says it."""


class Taken(Protocol):
    """A no_alloc load: what a placement takes."""

    def __call__(self, workload: Workload, placement: Placement, /, attention: Attention) -> LoadBytes: ...


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """A model as the header of its GGUF describes it. operators: in graph order."""

    model: ModelInfo
    operators: tuple[Operator, ...]
    graph: Graph


@dataclass(frozen=True, slots=True)
class Memory:
    """device_bytes: free on the device. host_budget: bytes of the host for second copies of weights. on_host: what a
    workload takes on the CPU alone; None: counted from the header (counted_load)."""

    device_bytes: int
    host_budget: int
    on_host: Callable[[Workload, Attention], LoadBytes] | None = None


def pure_problems(
    header: ModelHeader, profile: Profile, options: Options, memory: Memory, routing: Routing | None = None
) -> Problems:
    """The problems for all attention modes, their no_alloc loads counted."""
    of = partial(pure_problem, header, profile, options, memory, routing=routing)
    return Problems(AttentionRule(header.model, options), profile, of)


def problem_of(
    header: ModelHeader,
    options: Options,
    profile: Profile,
    flash_attn: FlashAttention,
    taken: Taken,
    host_budget: int,
    routing: Routing | None,
    slices_only: bool = False,
) -> Problem:
    """The problem for one attention mode. taken: what a placement takes with an attention."""
    rule = AttentionRule(header.model, options)
    return Problem(
        header.operators,
        header.graph,
        with_attention(profile, flash_attn),
        partial(taken, attention=rule.attention(flash_attn)),
        options.vram,
        options.vram_fill,
        options.gpu_weights,
        slices_only,
        host_budget,
        routing,
        flash_attn=flash_attn,
        allows=partial(rule.allows, flash_attn),
    )


def pure_problem(
    header: ModelHeader,
    profile: Profile,
    options: Options,
    memory: Memory,
    flash_attn: FlashAttention,
    routing: Routing | None = None,
) -> Problem:
    """The problem for one attention mode, its no_alloc loads counted."""

    def taken(workload: Workload, placement: Placement, attention: Attention) -> LoadBytes:
        host = memory.on_host(workload, attention) if memory.on_host else counted_load(header, workload, attention)
        return counted_load_of(host, header.operators, header.model.n_layer, memory.device_bytes)(workload, placement)

    return problem_of(header, options, profile, flash_attn, taken, memory.host_budget, routing)


def counted_load(header: ModelHeader, workload: Workload, attention: Attention) -> LoadBytes:
    """Bytes of a load on the CPU alone, counted: operators, a KV cache of full attention in every layer, and compute
    buffers that grow with the micro-batch, without flash attention by its scores too."""
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
