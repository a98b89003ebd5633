"""What placement_seconds adds up, task by task in graph order: whole operators, the rest of each layer, crossings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from oallama.core.types import Operator
from oallama.cost.graph import AFTER_ATTENTION, node_sides
from oallama.cost.offload import HostCache
from oallama.cost.operators import OFFLOAD_MIN_TOKENS
from oallama.cost.placement import Costs

Engine = Literal["cpu", "gpu", "in", "out"]
"""One of the four streams: what computes, or the direction that is copied in, host to device and back."""

TaskKind = Literal["operator", "rest", "crossing", "launch", "weights", "cache"]


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes one stream for a while, with nothing beside it. It is one of a pass."""

    stream: Engine
    kind: TaskKind
    name: str
    seconds: float
    of_host: bool  # counted with what the host has, even where llama.cpp lets the device compute it


def whole_tasks(
    costs: Costs,
    operators: Sequence[Operator],
    on_device: Sequence[bool],
    first_device_layer: int,
    cache: HostCache | None = None,
    sliced: Collection[int] = (),
) -> tuple[Task, ...]:
    """The tasks of one pass, or of passes over the same number of tokens, each as long as theirs together; their sum is
    placement_seconds. on_device, first_device_layer, sliced: as there. cache: of a layer that the host keeps.
    """
    graph = costs.graph
    large = bool(costs.offloaded) and all(p.n_tokens >= OFFLOAD_MIN_TOKENS for p in costs.passes)
    there, from_layer = list(on_device), first_device_layer
    if large and any(off and i not in sliced for i, off in enumerate(costs.offloaded)):
        there = [
            on or (off and i not in sliced) for i, (on, off) in enumerate(zip(there, costs.offloaded, strict=True))
        ]
        from_layer = 0
    sides = node_sides(graph, there, from_layer)
    rates, made = costs.rates, list[Task]()

    def rest(layer: int) -> None:
        """Norms, attention and what else is no operator."""
        name = f"layer {layer}: attention, norms and the rest"
        if layer >= first_device_layer:
            made.append(Task("gpu", "rest", name, costs.rest_device_s, False))
        elif large and cache is not None:
            up_s = sum(p.count * cache.upload_seconds(p.n_kv) for p in costs.passes)
            copies_s = costs.rest_cpu_s - costs.rest_device_s
            up_s = min(up_s, copies_s)
            made.append(Task("in", "cache", f"layer {layer}: KV cache", up_s, True))
            made.append(Task("gpu", "rest", name, costs.rest_device_s, True))
            made.append(Task("out", "cache", f"layer {layer}: new keys and values", copies_s - up_s, True))
        else:
            made.append(Task("cpu", "rest", name, costs.rest_cpu_s, True))

    def compute(index: int) -> None:
        cost, name = costs.operators[index], operators[index].name
        if on_device[index]:
            made.append(Task("gpu", "operator", name, cost.t_gpu_s or 0.0, False))
        elif cost.streamed_s > 0:
            made.append(Task("in", "weights", name, cost.streamed_s, True))
            made.append(Task("gpu", "operator", name, cost.t_cpu_s - cost.streamed_s, True))
        else:
            made.append(Task("cpu", "operator", name, cost.t_cpu_s, True))

    def cross(source: int, to_device: bool) -> None:
        node, line = graph.nodes[source], rates.copy_in if to_device else rates.copy_out
        seconds = sum(
            p.count * line.seconds((p.n_outputs if node.outputs_only else p.n_tokens) * node.bytes_per_token)
            for p in costs.passes
        )
        made.append(Task("in" if to_device else "out", "crossing", "activations", seconds, False))

    launch_s = sum(p.count for p in costs.passes) * rates.split_s
    before = False  # the side of the node before
    for layer, (first, last) in enumerate(graph.layer_nodes):
        copied: set[tuple[int, bool]] = set()
        rested = layer >= graph.n_run
        for i in range(first, last):
            node, side = graph.nodes[i], sides[i]
            for source in node.inputs:
                if sides[source] != side and (source, side) not in copied:
                    copied.add((source, side))
                    cross(source, side)
            if side and not before:
                made.append(Task("cpu", "launch", "launch", launch_s, False))
            before = side
            if node.operator is not None:
                if not rested and operators[node.operator].role in AFTER_ATTENTION:
                    rest(layer)
                    rested = True
                if node.operator not in sliced:
                    compute(node.operator)
        if not rested:
            rest(layer)
    return tuple(task for task in made if task.seconds > 0)
