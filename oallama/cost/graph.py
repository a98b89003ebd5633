"""The model's graph, and the splits and copies that ggml's scheduler makes of a placement.

The transfer cost T' of OATO (section 3.2: "three kinds of operator connections ... the extra delay of moving
intermediate results") belongs to edges, not to operators. So the model's graph is a list of nodes in execution order,
and the rules of ggml_backend_sched (ggml 0.26.0, passes 1, 2 and 5) are applied to a placement: a node with weights
runs where its weights are; an unassigned node follows a device neighbour in graph order (down first, then up); all
other nodes run on the CPU. Consecutive nodes on one side form a split; an input from the other side is copied once.

Of the nodes that are not operators only those are kept that decide where data flows: norms (their weights are on the
layer's device), the KV write and attention (on the device that holds the layer's KV), GLU and residual adds
(unassigned).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from oallama.core.types import ModelInfo, Operator
from oallama.cost.blocks import F32

PREVIOUS = -1
"""Index of the node before a layer, which its first node reads."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a layer. At most one of `operator`, `follows_layer` and `host` is set and says where it runs; none:
    unassigned."""

    inputs: tuple[int, ...]  # indices of earlier nodes of the layer, or PREVIOUS
    bytes_per_token: int  # of its output
    operator: int | None  # counted from the layer's first
    follows_layer: bool  # runs where its layer's norms and KV are
    host: bool  # always on the CPU (embedding look-up, logits read by the sampler)
    outputs_only: bool  # computed only for the tokens whose logits are wanted


class DeviceCopies(NamedTuple):
    """Numbers of splits and copies, and bytes copied, of a placement, or of one layer, in one forward pass."""

    splits: int  # on both sides, as llama.cpp logs "graph splits"
    device_splits: int  # on the device
    copies_in: int  # host -> device
    copies_out: int  # device -> host
    bytes_in_per_token: int
    bytes_out_per_token: int
    bytes_in_per_output: int  # for each token whose logits are wanted
    bytes_out_per_output: int


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The nodes of a layer, and the node before them. Equal layers of a graph are one object."""

    nodes: tuple[Node, ...]
    previous: Node | None
    n_operators: int

    def node(self, index: int) -> Node | None:
        """The node that `inputs` name so."""
        return self.previous if index == PREVIOUS else self.nodes[index]


@dataclass(frozen=True)
class Graph:
    """The layers in execution order, and last the output part. Every layer begins with a norm and ends with the node
    that the next layer reads; the embedding is in the first layer."""

    layers: tuple[Layer, ...]
    n_run: int  # layers that a decode runs; later ones (MTP) only predict further tokens. In a part of a model (`part`)
    # it may exceed n_layer

    @cached_property
    def layer_operators(self) -> tuple[tuple[int, int], ...]:
        """The operators [first, last) of each layer."""
        return tuple(pairwise(accumulate((layer.n_operators for layer in self.layers), initial=0)))

    @cached_property
    def operator_layer(self) -> tuple[int, ...]:
        """Operator.layer_in of each operator."""
        return tuple(number for number, layer in enumerate(self.layers) for _ in range(layer.n_operators))

    @property
    def n_layer(self) -> int:
        """Number of layers without the output part."""
        return len(self.layers) - 1

    @property
    def n_computed(self) -> int:
        """Number of layers of this graph that a decode runs."""
        return min(self.n_layer, self.n_run)

    def part(self, window: tuple[int, int]) -> Graph:
        """The layers [window[0], window[1]) as a graph. It lacks the input of its first layer. Its output part is empty
        if the window does not contain the model's."""
        begin, end = window
        output = () if end > self.n_layer else (Layer((), None, 0),)
        first = replace(self.layers[begin], previous=None)
        return Graph((first, *self.layers[begin + 1 : end], *output), self.n_run - begin)

    def operators_of(self, window: tuple[int, int]) -> tuple[int, int]:
        """[first, last) operator of the layers [window[0], window[1])."""
        return self.first_operator(window[0]), self.first_operator(window[1])

    def first_operator(self, layer: int) -> int:
        """The first operator of this layer or a later one; the number of operators if these have none."""
        return self.layer_operators[layer][0] if layer <= self.n_layer else len(self.operator_layer)

    def with_neighbours(self, first: int, last: int) -> tuple[int, int]:
        """The layers [first, last) with one neighbour on each side. Device copies change no further away, as every
        layer begins with a norm whose side is fixed."""
        return max(0, first - 1), min(last + 1, self.n_layer + 1)


_ATTENTION_IN = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_q_a", "attn_kv_a_mqa")
_ATTENTION_MIDDLE = {"attn_q_b": "attn_q_a", "attn_kv_b": "attn_kv_a_mqa", "attn_k_b": "attn_q_b"}
AFTER_ATTENTION = ("attn_v_b", "attn_output", "attn_out", "attn_gate")
_NORM_AFTER = {
    "attn_q": "attn_q_norm",
    "attn_k": "attn_k_norm",
    "attn_q_a": "attn_q_a_norm",
    "attn_kv_a_mqa": "attn_kv_a_norm",
    "attn_output": "post_attention_norm",
    "ffn_down": "post_ffw_norm",
}
"""Norms directly after an operator: their weights are on the layer's device, so the data must be there."""
_FFN_DOWN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
_ROUTER = ("ffn_gate_inp", "ffn_gate_inp_shexp")


def computes_outputs_only(operator: Operator, n_run: int) -> bool:
    """Whether an operator computes only tokens whose logits are wanted (the last one of a prompt): after the last
    layer's attention llama.cpp drops all others, before that layer's FFN and the output."""
    return operator.is_last or (operator.layer == n_run - 1 and operator.role.startswith("ffn_"))


def build_graph(model: ModelInfo, operators: Sequence[Operator], tensor_names: Iterable[str] = ()) -> Graph:
    """The node list of a model from its operators (in graph order) and, for the norms between them, its tensor names.

    Operators with unknown roles are chained in order; a contiguous placement then has no more device copies than in
    the real graph.
    """
    n_run = max((1 + operator.layer for operator in operators if operator.layer is not None), default=model.n_layer)
    by_layer: dict[int, list[Operator]] = {}  # a decoder behind an encoder may have more layers, which are left out
    for operator in operators:
        by_layer.setdefault(operator.layer_in(model.n_layer), []).append(operator)
    names, known = frozenset(tensor_names), dict[Hashable, Layer]()
    layers: list[Layer] = []
    previous: Node | None = None
    for number in range(model.n_layer + 1):
        members = by_layer.get(number, [])
        builder = _Builder(model.n_embd * F32, number, n_run, names)
        stream = PREVIOUS if number else builder.add((), builder.embd, host=True)  # token embedding
        if number < model.n_layer:
            builder.add_layer(stream, members)
        else:
            builder.add_output(stream, members)
        layer = Layer(tuple(builder.nodes), previous, len(members))
        layers.append(known.setdefault((layer.nodes, previous, len(members)), layer))
        previous = replace(layer.nodes[-1], inputs=(), operator=None, follows_layer=False)
    return Graph(tuple(layers), n_run)


def _output_bytes(operator: Operator) -> int:
    """Bytes of one token's output: N rows, for each routed expert, and for each head of a per-head (MLA) weight."""
    heads = operator.shape[2] if operator.op == "MUL_MAT" else operator.n_expert_used
    return operator.shape[1] * heads * F32


def _attention_bytes(output: Operator) -> int:
    """Bytes of one token's attention output: the K of the projection that reads it, once per head for MLA's v_b."""
    return output.shape[0] * (output.shape[2] if output.op == "MUL_MAT" else 1) * F32


class _Builder:
    """Collects the nodes of a layer. outputs_only: of the nodes added from now on."""

    def __init__(self, embd: int, layer: int, n_run: int, tensor_names: frozenset[str]) -> None:
        self.nodes: list[Node] = []
        self.embd = embd  # bytes of a token's activation between layers
        self.outputs_only = layer >= n_run
        self._layer, self._is_last_run, self._tensor_names = layer, layer == n_run - 1, tensor_names

    def add(
        self,
        inputs: Sequence[int],
        n_bytes: int,
        operator: int | None = None,
        follows_layer: bool = False,
        host: bool = False,
    ) -> int:
        node = Node(tuple(dict.fromkeys(inputs)), n_bytes, operator, follows_layer, host, self.outputs_only)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def add_output(self, stream: int, operators: Sequence[Operator]) -> None:
        """Add the output part: its norm, its operators one after another, and the logits, which the host reads."""
        self.outputs_only = True
        stream = self.add((stream,), self.embd, follows_layer=True)
        for index, operator in enumerate(operators):
            stream = self.add((stream,), operator.shape[1] * F32, operator=index)
        self.add((stream,), 0, host=True)

    def add_operator(self, index: int, inputs: Sequence[int], role: str, n_bytes: int) -> int:
        """Add an operator, and the norm directly after it if this model has one."""
        node = self.add(inputs, n_bytes, operator=index)
        norm_weight = f"blk.{self._layer}.{_NORM_AFTER.get(role, '')}.weight"
        return self.add((node,), n_bytes, follows_layer=True) if norm_weight in self._tensor_names else node

    def add_layer(self, stream: int, operators: Sequence[Operator]) -> None:
        """Add a layer, with every point at which ggml may split a transformer block: the two norms, attention (with the
        KV write) and the GLU."""
        node_of: dict[str, int] = {}
        norm = self.add((stream,), self.embd, follows_layer=True)
        attention: int | None = None
        ffn_norm: int | None = None
        heads: list[int] = []  # outputs that feed attention
        hidden: dict[str, list[int]] = {}  # outputs that feed the GLU, by expert family suffix
        router: list[int] = []
        blocks: list[int] = []  # block outputs that are added to the residual

        for index, operator in enumerate(operators):
            role = operator.role
            n_bytes = _output_bytes(operator)
            if role in _ATTENTION_IN:
                node_of[role] = self.add_operator(index, (norm,), role, n_bytes)
                heads.append(node_of[role])
            elif role in _ATTENTION_MIDDLE:
                source = node_of.get(_ATTENTION_MIDDLE[role], norm)
                node_of[role] = self.add((source,), n_bytes, operator=index)
                heads = [h for h in heads if h != source] + [node_of[role]]
            elif role in AFTER_ATTENTION:
                if attention is None:
                    attention = self.add(heads or (norm,), _attention_bytes(operator), follows_layer=True)
                source = node_of.get("after_attention", attention)
                node_of["after_attention"] = self.add_operator(index, (source,), role, n_bytes)
            elif role.startswith("ffn_"):
                if ffn_norm is None:
                    blocks_in = node_of.get("after_attention", attention if attention is not None else norm)
                    self.outputs_only = self._is_last_run
                    stream = self.add((stream, blocks_in), self.embd)  # residual add
                    ffn_norm = self.add((stream,), self.embd, follows_layer=True)
                family = role.rsplit("_", 1)[1] if role.endswith(("_exps", "_shexp")) else ""
                if role in _ROUTER:
                    router.append(self.add((ffn_norm,), n_bytes, operator=index))
                elif role in _FFN_DOWN:
                    sources = hidden.get(family) or [ffn_norm]
                    glu = self.add(sources, operator.shape[0] * operator.n_expert_used * F32)
                    routed = router if operator.routed else []
                    blocks.append(self.add_operator(index, (glu, *routed), role, n_bytes))
                else:
                    routed = router if operator.routed else []
                    hidden.setdefault(family, []).append(self.add((ffn_norm, *routed), n_bytes, operator=index))
            else:
                norm = self.add((norm,), n_bytes, operator=index)
        if ffn_norm is None:
            blocks = [node_of.get("after_attention", norm)]
        self.add((stream, *blocks), self.embd)


def _side(node: Node, on_device: Sequence[int], layer_on_device: bool) -> bool | None:
    """Pass 1 of the scheduler: whether the node runs on the device; None: unassigned. layer_on_device: whether norms
    and KV of its layer are on the device."""
    if node.operator is not None:
        return bool(on_device[node.operator])
    if node.follows_layer:
        return layer_on_device
    return False if node.host else None


def _expanded(sides: list[bool | None]) -> list[bool]:
    """Pass 2 of the scheduler: a node without a side (None) follows a device neighbour, the one before it first."""
    for order in (range(len(sides)), range(len(sides) - 1, -1, -1)):
        near_device = False
        for i in order:
            if sides[i] is None:
                if near_device:
                    sides[i] = True
            else:
                near_device = bool(sides[i])
    return [bool(side) for side in sides]


def device_copies(
    graph: Graph, on_device: Sequence[bool], first_device_layer: int, window: tuple[int, int] | None = None
) -> DeviceCopies:
    """Count splits and copies of a placement, over the whole graph or over the layers [window[0], window[1]) only.

    on_device: one entry per operator. Layers >= first_device_layer have their norms and KV on the device (llama.cpp
    gives the last n_gpu_layers to it; the part after the last block counts as layer n_layer).
    """
    low, high = window or (0, graph.n_layer + 1)
    high -= not graph.layers[high - 1].nodes  # a part may have an empty output part
    sides = bytes(on_device[graph.layer_operators[low][0] : graph.layer_operators[high - 1][1]])
    return _device_copies(graph.layers[low:high], sides, first_within(first_device_layer, (low, high)))


def first_within(first_device_layer: int, window: tuple[int, int]) -> int:
    """first_device_layer counted from the first layer of the window; clamped to the window."""
    low, high = window
    return min(max(first_device_layer, low), high) - low


@lru_cache(maxsize=2**14)
def _device_copies(layers: tuple[Layer, ...], on_device: bytes, first_device_layer: int) -> DeviceCopies:
    """Count device copies of consecutive layers.

    Layer by layer, as a layer's counts depend only on the side on which the layer before ends and the next one begins.
    Most layers of a model are equal, so few are counted.
    """
    counts: list[DeviceCopies] = []
    previous_side: bool | None = None
    begin = 0
    for index, layer in enumerate(layers):
        end = begin + layer.n_operators
        next_side = index + 1 >= first_device_layer if index + 1 < len(layers) else None
        layer_counts, previous_side = _of_layer(
            layer, on_device[begin:end], index >= first_device_layer, previous_side, next_side
        )
        counts.append(layer_counts)
        begin = end
    total = DeviceCopies(*map(sum, zip(*counts, strict=True)))
    return total._replace(splits=1 + total.splits)


@lru_cache(maxsize=2**16)
def _of_layer(
    layer: Layer, on_device: bytes, layer_on_device: bool, previous_side: bool | None, next_side: bool | None
) -> tuple[DeviceCopies, bool]:
    """(a layer's counts, the side on which it ends). on_device: 1 for each operator on the device.
    layer_on_device: whether its norms and KV are on the device. previous_side: the side on which the layer before ends;
    None: no layer, and its output is not counted. next_side: the side on which the next layer begins; None: no
    layer."""
    own_sides = [_side(node, on_device, layer_on_device) for node in layer.nodes]
    sides = _expanded(own_sides if next_side is None else [*own_sides, next_side])[: len(own_sides)]
    previous_sides = [] if previous_side is None else [previous_side]
    computed = [s for s, node in zip(sides, layer.nodes, strict=True) if node.bytes_per_token]
    splits = sum(a != b for a, b in pairwise([*previous_sides, *computed]))
    device_splits = sum(b and not a for a, b in pairwise([bool(previous_side), *sides]))
    copied: set[tuple[int, bool]] = set()
    counts = [0, 0]  # by side of the reader: [out, in]
    n_bytes = [0, 0]
    output_bytes = [0, 0]
    for side, reader in zip(sides, layer.nodes, strict=True):
        for source in reader.inputs:
            source_side, node = previous_side if source == PREVIOUS else sides[source], layer.node(source)
            if node is None or source_side is None or source_side == side or (source, side) in copied:
                continue
            copied.add((source, side))
            counts[side] += 1
            if node.outputs_only:
                output_bytes[side] += node.bytes_per_token
            else:
                n_bytes[side] += node.bytes_per_token
    copies = (counts[1], counts[0], n_bytes[1], n_bytes[0], output_bytes[1], output_bytes[0])
    return DeviceCopies(splits, device_splits, *copies), sides[-1]
