"""A plan from what is known of a model and a machine alone: header, profile, options and memory. Pure.

No device, no load and no file is touched. What `oallama simulate` plans for a described machine, and what the corpus of
plans (tests/golden/corpus) is made by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oallama.core.ggml_types import bytes_per_element
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import Attention, FlashAttention, ModelInfo, Operator, Phase, PlanRecord, Workload
from oallama.core.units import KIB
from oallama.cost.graph import Graph
from oallama.cost.passes import Pass
from oallama.place.attention import AttentionRule, with_attention
from oallama.place.bound import physical_bound
from oallama.place.decide import decide
from oallama.place.placed import Placed
from oallama.place.policies.registry import Policy, Rules
from oallama.place.policies.stock import FIT
from oallama.place.problem import Decision, LoadBytes, Problem
from oallama.place.record import plan_record
from oallama.place.what_if import HostLoad, probe_of

COMPUTE_BYTES_PER_TOKEN = 512 * KIB
"""Of a context's buffers, for each token of a micro-batch, where no load says it."""


@dataclass(frozen=True, slots=True)
class Header:
    """A model as the header of its GGUF describes it. operators: in graph order."""

    model: ModelInfo
    operators: tuple[Operator, ...]
    graph: Graph


@dataclass(frozen=True, slots=True)
class Memory:
    """device_bytes: free on the device. host_room: bytes of the host for second copies of weights. on_host: what a
    workload takes on the CPU alone; None: counted from the header (counted_load)."""

    device_bytes: int
    host_room: int
    on_host: Callable[[Workload, Attention], HostLoad] | None = None


def pure_plan(
    header: Header,
    profile: Profile,
    options: Options,
    memory: Memory,
    load: Workload,
    policy: str | Policy = "auto",
    rules: Rules = Rules(),  # noqa: B008 - frozen
    routing: Routing | None = None,
    larger_ubatches: Sequence[int] = (),
) -> PlanRecord:
    """The plan of a policy. FIT: as what-if predicts llama.cpp's --fit, with flash attention unless that is off.
    larger_ubatches: micro-batches above the workload's that may be taken instead.

    Raises UsageError, DoesNotFit.
    """

    def problem(flash_attn: FlashAttention) -> Problem:
        return pure_problem(header, profile, options, memory, flash_attn, routing)

    if policy == FIT and options.flash_attn != "off":
        options = replace(options, flash_attn="on")
    rule = AttentionRule(header.model, options)
    decision, way = decide_with_attention(
        problem, rule, profile, policy, load, "mixed", rules, larger_ubatches=larger_ubatches
    )
    record = plan_record(decision, header.model, header.operators, profile.device, "")
    bound = physical_bound(problem(way), record.workload, record.memory)
    return replace(record, attention=rule.attention(way), bound=bound)


def decide_with_attention(
    problem: Callable[[FlashAttention], Problem],
    rule: AttentionRule,
    profile: Profile,
    policy: str | Policy,
    load: Workload,
    phase: Phase,
    rules: Rules,
    attention_passes: Sequence[Pass] | None = None,
    larger_ubatches: Sequence[int] = (),
) -> tuple[Decision, FlashAttention]:
    """The decision of a policy (place/decide.py) and its way of attention, chosen together. attention_passes: forward
    passes that attention is chosen for; None: those of the workload. Raises UsageError, DoesNotFit."""

    def made(flash_attn: FlashAttention) -> Decision:
        sizes = [n for n in larger_ubatches if rule.allows(flash_attn, replace(load, n_ubatch=n))]
        return decide(problem(flash_attn), policy, load, phase, rules, larger_ubatches=sizes)

    return rule.decide(made, profile, load, attention_passes)


def pure_problem(
    header: Header,
    profile: Profile,
    options: Options,
    memory: Memory,
    flash_attn: FlashAttention,
    routing: Routing | None = None,
) -> Problem:
    """The problem for one way of attention, its dry loads counted."""
    model, operators = header.model, header.operators
    attention = AttentionRule(model, options).attention(flash_attn)

    def probe(load: Workload, placed: Placed) -> LoadBytes:
        host = memory.on_host(load, attention) if memory.on_host else counted_load(header, load, attention)
        return probe_of(host, operators, model.n_layer, memory.device_bytes)(load, placed)

    return Problem(
        operators,
        header.graph,
        with_attention(profile, flash_attn),
        probe,
        options.vram,
        options.vram_fill,
        options.gpu_weights,
        host_room=memory.host_room,
        routing=routing,
    )


def counted_load(header: Header, load: Workload, attention: Attention) -> HostLoad:
    """Bytes of a load on the CPU alone, counted: operators, a KV cache of full attention in every layer, and compute
    buffers that grow with the micro-batch, without flash attention by its scores too."""
    model = header.model
    keys = model.n_embd_head_k * bytes_per_element(attention.type_k)
    values = model.n_embd_head_v * bytes_per_element(attention.type_v)
    compute = COMPUTE_BYTES_PER_TOKEN * load.largest_batch
    if attention.flash_attn == "off":
        compute += 4 * load.n_ctx * load.largest_batch * model.n_head
    return HostLoad(
        weights=sum(operator.bytes for operator in header.operators),
        kv=int(load.n_ctx * model.n_layer * model.n_head_kv * (keys + values)),
        compute=compute,
    )
