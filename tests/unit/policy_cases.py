"""Problems of small models on described machines, for tests of policies."""

from __future__ import annotations

from split_cases import EMBD, FF, World, llama, model, operator

from oallama.core.profile import LinearFit, Profile
from oallama.core.types import Operator, Workload
from oallama.cost.blocks import split_blocks
from oallama.cost.graph import build_graph
from oallama.cost.kernels import Kernels
from oallama.cost.slices import BlockType, block_types
from oallama.place.placement import Candidate, Placement, plan_record
from oallama.place.problem import LoadBytes, Problem
from oallama.plan.plan import Plan

N_LAYER = 2


LOAD = Workload(n_prompt=64, n_gen=32, n_ctx=256, n_ubatch=64)


PAIR = World(cpu_rate=1e9, device_rate=5e8)
"""A device half as fast as the CPU: no operator gains as a whole, all of them as slices."""


GPU = World(cpu_rate=1e9, device_rate=8e9)


class Table:
    """A probe: KV 1000 bytes a layer, norms 100, compute buffers only where llama.cpp has the device."""

    def __init__(self, ops: list[Operator], free: int, compute_per_token: int = 0) -> None:
        self.ops, self.free, self.compute_per_token = ops, free, compute_per_token

    def __call__(self, load: Workload, placed: Placement) -> LoadBytes:
        total = sum(op.bytes for op in self.ops)
        layers = max(0, N_LAYER - placed.first_device_layer)
        if placed.first_device_layer > N_LAYER:
            return LoadBytes(0, total, 0, 0, self.free)
        there = sum(op.bytes for op, on_device in zip(self.ops, placed.on_device, strict=True) if on_device)
        compute = self.compute_per_token * load.n_ubatch
        return LoadBytes(there + 100 * layers, total - there, 1000 * layers, compute, self.free)


def problem(world: World, free: int, ops: list[Operator] | None = None, **more: float) -> Problem:
    listed = ops or llama(N_LAYER)
    gpu_weights = more.pop("gpu_weights", None)
    probe = Table(listed, free, **more)  # type: ignore[arg-type]
    graph = build_graph(model(N_LAYER), listed)
    return Problem(tuple(listed), graph, world.profile(listed), probe, None, 0.9, gpu_weights)


def plan_of(made: Problem, decision: Candidate) -> Plan:
    return plan_record(decision, model(N_LAYER), made.operators, "rpc-worker", "")


def experts(biased: bool = False) -> list[Operator]:
    shapes = (("ffn_gate_exps", EMBD, FF), ("ffn_up_exps", EMBD, FF), ("ffn_down_exps", FF, EMBD))
    return [operator(role, k, n, e=8, used=2, biased=biased) for role, k, n in shapes]


FAST_LINK = LinearFit(1e-6, 2e-10, 1.0)


STREAMS = World(cpu_rate=2e8, device_rate=8e9, token_s_per_byte=5e-10, link=FAST_LINK)
"""A CPU so slow that most of a block is better streamed."""


def block_of(ops: list[Operator], profile: Profile, layout: str = "CPU") -> BlockType:
    """The FFN among these operators."""
    chosen = [FF * ("ffn" in op.role) for op in ops]
    (block,) = split_blocks(ops, chosen)
    return next(one for one in block_types(Kernels(profile), ops, block) if one.layout == layout)
