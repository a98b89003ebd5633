"""Small models on described machines, for tests of plans: each fact by its keyword, each plan as planned.

Such models are smaller than what a CUDA back end keeps for itself: tests use the fixture small_cards, or another card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.routing import LayerRouting, Routing
from oallama.core.types import (
    CPU_DEVICE,
    Attention,
    DecodeStep,
    MemoryBreakdown,
    ModelInfo,
    Operator,
    OperatorPlacement,
    Workload,
)
from oallama.cost.graph import build_graph
from oallama.device.card import Card, Host
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.planner.attention import ModelHeader
from oallama.planner.decide import plan, policy_named
from oallama.planner.placement import Placement, placed_by_plan, placed_whole
from oallama.planner.policies.registry import POLICIES, Policy, PolicyInputs, Request, Rules, policy
from oallama.planner.problem import LoadBytes, Problem
from oallama.planner.pure_plan import Memory, estimated_device_load, estimated_load, pure_problem, pure_problems
from oallama.planner.simulate import Simulation, simulate
from oallama.profile.described import described

CARD = Card(
    name="card", description="a card", memory_bytes=8 << 30, bytes_per_s=500e9, flops_per_s=50e12,
    flops_float_per_s=25e12, kernel_s=2e-6, launch_s=5e-6, launch_node_s=1e-6, copy_s=4e-6, copy_issue_s=1e-6,
    synchronize_s=3e-6, pinned_bytes_per_s=20e9, pageable_bytes_per_s=8e9,
)  # fmt: skip
HOST = Host(name="host", bytes_per_s=40e9, flops_per_s=1e12, source="nobody", flops_float_per_s=0.5e12)

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def model_info(
    *, n_layer: int = 2, n_embd: int = 512, n_ff: int = 1024, n_expert: int = 0, n_expert_used: int = 0, **more: object
) -> ModelInfo:
    usual = ModelInfo(
        path="m.gguf", arch="llama", name="m", n_layer=n_layer, n_embd=n_embd, n_ff=n_ff, n_head=8, n_head_kv=2,
        n_embd_head_k=n_embd // 8, n_embd_head_v=n_embd // 8, n_expert=n_expert, n_expert_used=n_expert_used,
        n_vocab=4096, n_ctx_train=4096, file_bytes=1, fingerprint="f" * 64,
    )  # fmt: skip
    return replace(usual, **more)


def weight(
    *, role: str, k: int, n: int, layer: int | None = None, n_expert: int = 0, used: int = 1, type_name: str = "Q4_0"
) -> Operator:
    """One weight; with experts, one that tokens are routed through."""
    e = max(1, n_expert)
    return Operator(
        name=f"{role}.weight" if layer is None else f"blk.{layer}.{role}.weight",
        layer=layer,
        role=role,
        op="MUL_MAT_ID" if n_expert else "MUL_MAT",
        type=type_name,
        shape=(k, n, e),
        bytes=GGML_TYPES_BY_NAME[type_name].n_bytes(k * n * e),
        active_fraction=used / e,
        n_expert_used=used,
    )


def weights_of(model: ModelInfo, *, type_name: str = "Q4_0", n_ffs: tuple[int, ...] = ()) -> tuple[Operator, ...]:
    """Llama's operators in graph order, or Mixtral's. n_ffs: of each layer, where they differ."""
    n_embd, n_kv = model.n_embd, model.n_head_kv * model.n_embd_head_k
    tail, used = ("_exps", model.n_expert_used) if model.n_expert else ("", 1)
    made = []
    for layer in range(model.n_layer):
        n_ff = n_ffs[layer] if n_ffs else model.n_ff
        for role, n in zip(ATTENTION, (n_embd, n_kv, n_kv, n_embd), strict=True):
            made.append(weight(role=role, k=n_embd, n=n, layer=layer, type_name=type_name))
        if model.n_expert:
            made.append(weight(role="ffn_gate_inp", k=n_embd, n=model.n_expert, layer=layer, type_name="F32"))
        for role, k, n in (("ffn_gate", n_embd, n_ff), ("ffn_up", n_embd, n_ff), ("ffn_down", n_ff, n_embd)):
            made.append(
                weight(role=role + tail, k=k, n=n, layer=layer, n_expert=model.n_expert, used=used, type_name=type_name)
            )
    return (*made, weight(role="output", k=n_embd, n=model.n_vocab, type_name=type_name))


def placed(
    name: str, *, gg: float = 0.0, cg: float = 0.0, layout: str | None = None, hot: tuple[int, ...] = ()
) -> OperatorPlacement:
    """What is not on the device or streamed is computed by the CPU."""
    return OperatorPlacement(name=name, gg=gg, cg=cg, cc=1.0 - gg - cg, layout=layout, hot_experts=hot)


def some_plan(operators: Iterable[OperatorPlacement], **changes: object) -> Plan:
    """A plan as a file may have it, with a memory breakdown that adds up and no prediction."""
    usual = Plan(
        model_path="m.gguf",
        model_fingerprint="f" * 64,
        machine_fingerprint="cd" * 32,
        device="CUDA0",
        policy="split",
        workload=Workload(n_prompt=64, n_gen=32, n_ctx=512),
        operators=tuple(operators),
        n_gpu_layers=0,
        memory=MemoryBreakdown(
            capacity=6000, fill=0.9, limit=5400, weights_gpu=3000, weights_host=2000, kv=512, compute=256, staging=0,
            spare=1632,
        ),
        predicted=None,
    )  # fmt: skip
    return replace(usual, **changes)


SMALL = model_info(n_layer=4, n_embd=1024, n_ff=2048)
ROUTED = replace(SMALL, n_expert=8, n_expert_used=2)


@dataclass(frozen=True, kw_only=True)
class World:
    """A model, a machine, and what is asked of them.

    share: of the weights that fit the device beside KV cache and buffers; room: bytes that do, where they are given.
    repacked: how many times faster the CPU is in a second layout; 0: it has none. uses: of each expert in decode, of
    every layer; none: not known; latest: in the last recording, where they were others. biased: of experts, each has a
    bias.
    """

    model: ModelInfo = model_info()  # noqa: RUF009 - frozen
    type_name: str = "Q4_0"
    n_ffs: tuple[int, ...] = ()
    card: Card = CARD
    host: Host = HOST
    tokens: tuple[int, ...] = (1, 8, 32, 128, 512)
    share: float = 0.5
    room: int | None = None
    host_copies_limit: int = 1 << 40
    compute_per_token: int = 2048
    repacked: float = 0.0
    device_facts: tuple[tuple[str, object], ...] = ()
    workload: Workload = Workload(n_prompt=64, n_gen=32, n_ctx=512)  # noqa: RUF009
    options: Options = Options(flash_attn="on")  # noqa: RUF009
    uses: tuple[float, ...] = ()
    latest: tuple[float, ...] = ()
    biased: bool = False

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        made = weights_of(self.model, type_name=self.type_name, n_ffs=self.n_ffs)
        return tuple(replace(o, biased=self.biased and o.routed) for o in made)

    @cached_property
    def header(self) -> ModelHeader:
        return ModelHeader(self.model, self.operators, build_graph(self.model, self.operators))

    @cached_property
    def profile(self) -> Profile:
        made = described(self.host, self.card, self.model, self.operators, self.tokens)
        if self.repacked:
            own = [case for case in made.cases if case.device == CPU_DEVICE and case.mul_mat.type == self.type_name]
            faster = (
                replace(case, layout="CPU_REPACK", seconds=case.seconds / self.repacked, samples=()) for case in own
            )
            made = replace(made, cases=(*made.cases, *faster))
        return replace(made, fingerprint={**made.fingerprint, **dict(self.device_facts)})

    def with_profile(self, **changes: object) -> World:
        """This world as a profile with these changes has it."""
        made = replace(self)
        vars(made)["profile"] = replace(self.profile, **changes)
        return made

    def taken(self, workload: Workload, attention: Attention) -> LoadBytes:
        """By a load on the CPU alone."""
        compute = self.compute_per_token * workload.largest_batch
        return replace(estimated_load(self.header, workload, attention), compute=compute)

    @property
    def device_bytes(self) -> int:
        """Free on the card: the share of the weights and what the largest load takes beside them."""
        taken = self.taken(self.workload, Attention())
        room = self.share * taken.weights_host if self.room is None else self.room
        return int((room + taken.kv + taken.compute) / self.options.vram_fill) + 1

    @property
    def routing(self) -> Routing | None:
        if not self.uses:
            return None
        layers = tuple(
            LayerRouting(layer=layer, n_tokens=8192, uses=self.uses, before=self.uses, latest=self.latest or self.uses)
            for layer in range(self.model.n_layer)
        )
        return Routing(
            version=1, model_fingerprint=self.model.fingerprint, n_expert=self.model.n_expert,
            n_expert_used=self.model.n_expert_used, half_life_tokens=4096, decode=layers, prompt=layers,
        )  # fmt: skip

    def plan(
        self,
        policy: str | Policy = "auto",
        *,
        rules: Rules = Rules(),  # noqa: B008
        larger_ubatches: tuple[int, ...] = (),
    ) -> Plan:
        """Raises UsageError, DoesNotFit."""
        memory = Memory(self.device_bytes, self.host_copies_limit, self.taken)
        problems = pure_problems(self.header, self.profile, self.options, memory, self.routing)
        return plan(
            problems, Request(self.workload, policy_named(policy, rules), rules=rules, n_ubatches=larger_ubatches)
        )

    def placer(self, hidden: Callable[[int], int] = lambda placed_bytes: 0) -> Placer:
        """On this machine, without any load. hidden: of the operators' bytes on the device, what a load takes there
        beside what is counted."""
        found = Placer(self.model, self.operators, [o.name for o in self.operators], self.options, self.profile)

        def taken(workload: Workload, placement: Placement, attention: Attention) -> LoadBytes:
            on_host = self.taken(workload, attention)
            counted = estimated_device_load(on_host, self.operators, self.model.n_layer, self.device_bytes)(
                workload, placement
            )
            return replace(counted, compute=counted.compute + hidden(counted.weights_gpu))

        def on_host(workload: Workload, attention: Attention) -> tuple[int, int, int]:
            counted = self.taken(workload, attention)
            return counted.weights_host, counted.kv, counted.compute

        loads: Any = SimpleNamespace(
            taken=taken,
            on_host=on_host,
            together=nullcontext,
            begin_on_host=lambda *_: None,
            check_host=lambda *_: None,
        )
        found.no_alloc_loads = loads
        found.__dict__["routing"] = self.routing
        return found

    def alone(self, profile: Profile | None = None) -> Placer:
        """As placer, without a device. profile: None: nothing is known of the CPU."""
        found = replace(self, options=replace(self.options, device="none")).placer()
        found._profile = profile
        return found

    def simulate(self, plan: Plan, workload: Workload | None = None) -> Simulation:
        """What runs when, by a plan that is read back; workload: None: the plan's."""
        memory = Memory(self.device_bytes, self.host_copies_limit, self.taken)
        way = plan.attention.flash_attn
        problem = pure_problem(self.header, self.profile, self.options, memory, way, self.routing)
        return simulate(problem, workload or plan.workload, placed_by_plan(self.model.n_layer, self.operators, plan))


FAST = replace(
    CARD, kernel_s=0.0, launch_s=0.0, launch_node_s=0.0, copy_s=0.0, copy_issue_s=0.0, synchronize_s=0.0,
    bytes_per_s=8e12,
)  # fmt: skip
"""No fixed times: what is computed and copied is all that counts."""

PLAIN_HOST = replace(HOST, kernel_s=0.0, dram_bytes_per_s=1e15)


def linked(rate: float) -> Card:
    return replace(FAST, pinned_bytes_per_s=rate, pageable_bytes_per_s=rate)


def slow_cpu(**facts: object) -> World:
    """A CPU of 20 GB/s, a link of 10 GB/s, a card that takes hardly any time."""
    host = replace(PLAIN_HOST, bytes_per_s=20e9)
    token = Workload(n_prompt=1, n_gen=100, n_ctx=512)
    return replace(World(card=linked(10e9), host=host, workload=token), **facts)


def long_prompt(**facts: object) -> World:
    """A CPU that is slow in prompts, and a device to which llama.cpp itself sends no batches."""
    return slow_cpu(**{
        "host": replace(PLAIN_HOST, bytes_per_s=20e9, flops_per_s=2e11), "model": model_info(n_embd=1024, n_ff=4096),
        "share": 2.0, "workload": Workload(n_prompt=512, n_gen=100, n_ctx=1024),
        "options": Options(flash_attn="on", gpu_weights=0.2), "device_facts": (("device_backend", "RPC"),), **facts,
    })  # fmt: skip


def routed(uses: tuple[float, ...] = (), **facts: object) -> World:
    """A model of 8 experts, of which each token uses two."""
    return slow_cpu(model=model_info(n_expert=8, n_expert_used=2), uses=uses, share=0.45, **facts)


def total_s(plan: Plan) -> float:
    return plan.predicted.total_s


def bytes_of(operators: Iterable[Operator]) -> int:
    return sum(operator.bytes for operator in operators)


def there(world: World, plan: Plan) -> list[Operator]:
    """The operators that lie on the device whole."""
    return [o for o, place in zip(world.operators, plan.operators, strict=True) if place.gg == 1]


def device_bytes(operators: tuple[Operator, ...], plan: Plan) -> Iterator[float]:
    """Of each operator, the bytes that stay on the device."""
    for operator, place in zip(operators, plan.operators, strict=True):
        yield operator.bytes * (place.gg + len(place.hot_experts) / operator.shape[2])


FACTORS = st.sampled_from([0.3, 0.6, 1.0, 2.0, 5.0])


@st.composite
def cards(draw: st.DrawFn) -> Card:
    memory, link, flops, wait = (draw(FACTORS) for _ in range(4))
    return replace(
        CARD, bytes_per_s=CARD.bytes_per_s * memory, flops_per_s=CARD.flops_per_s * flops,
        flops_float_per_s=CARD.flops_float_per_s * flops, pinned_bytes_per_s=CARD.pinned_bytes_per_s * link,
        pageable_bytes_per_s=CARD.pageable_bytes_per_s * link, kernel_s=CARD.kernel_s * wait,
        launch_s=CARD.launch_s * wait, synchronize_s=CARD.synchronize_s * wait,
    )  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Anything that the planner meets, small."""
    n_expert = draw(st.sampled_from([0, 0, 4]))
    n_ff = draw(st.sampled_from([1024, 1408, 2816]))
    model = model_info(
        n_layer=draw(st.integers(1, 3)), n_ff=n_ff, n_expert=n_expert, n_expert_used=2 if n_expert else 0
    )
    n_prompt = draw(st.sampled_from([1, 64, 600]))
    skewed = n_expert and draw(st.booleans())
    return World(
        model=model,
        type_name=draw(st.sampled_from(["Q4_0", "Q8_0", "F16"])),
        card=draw(cards()),
        host=replace(HOST, bytes_per_s=HOST.bytes_per_s * draw(FACTORS), flops_per_s=HOST.flops_per_s * draw(FACTORS)),
        share=draw(st.sampled_from([0.02, 0.2, 0.5, 0.8, 1.2])),
        host_copies_limit=draw(st.sampled_from([0, 1 << 40])),
        repacked=draw(st.sampled_from([0.0, 1.5])),
        device_facts=draw(st.sampled_from([(), (("device_asynchronous", False), ("device_backend", "RPC"))])),
        workload=Workload(
            n_prompt=n_prompt,
            n_gen=draw(st.sampled_from([0, 16, 200])),
            n_ctx=1024,
            n_past=draw(st.sampled_from([0, 100])),
            step=draw(st.sampled_from([DecodeStep(), DecodeStep(4), DecodeStep(1, 2, 1.2, 2e-5, 1e-4)])),
        ),
        options=Options(
            flash_attn=draw(st.sampled_from(["on", "off", "auto"])),
            gpu_weights=draw(st.sampled_from([None, None, 0.0, 0.4])),
        ),
        uses=(4000.0, 2000.0, 100.0, 50.0) if skewed else (),
    )


@contextmanager
def own_policy(name: str, found: Callable[[Problem, PolicyInputs], Iterable[Placement]]) -> Iterator[Policy]:
    """A policy as a user would write it, registered for a while."""
    yield policy(name, "as a test has it")(found)
    del POLICIES[name]


def first_come(problem: Problem, inputs: PolicyInputs) -> Iterator[Placement]:
    """Operators in graph order, until the device is full."""
    first = inputs.first_device_layer
    left, places = inputs.operator_bytes(first), []
    for operator, layer in zip(problem.operators, problem.graph.operator_layer, strict=True):
        places.append(layer >= first and operator.bytes <= left)
        left -= operator.bytes if places[-1] else 0
    yield placed_whole(inputs.costs, places, first)


def every(firsts: Sequence[int] = (0, 1)) -> AbstractContextManager[Policy]:
    """A policy that looks at all placements of whole operators of one layer that fit. firsts: the first layers with
    their norms and KV on the device."""

    def found(problem: Problem, inputs: PolicyInputs) -> Iterator[Placement]:
        for first in firsts:
            sides = [(False, True) if layer >= first else (False,) for layer in problem.graph.operator_layer]
            for choice in product(*sides):
                used = sum(o.bytes for o, on in zip(problem.operators, choice, strict=True) if on)
                if used <= inputs.operator_bytes(first):
                    yield placed_whole(inputs.costs, choice, first)

    return own_policy("every", found)
