"""The operators a real decode runs, read off llama.cpp's graph: what oallama/model/operators.py must agree with.

`cb_eval` of the context shows every node before it is computed. The decode happens in a child process,
because llama.cpp aborts on some files that no check foresees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from traced import decode, traced

from oallama.bench.readback import weight_of
from oallama.core.types import Shape
from oallama.model.gguf_reader import read_gguf
from oallama.model.roles import tensor_role

Traced = tuple[str, str, Shape, bool, bool]
"""A mul-mat of the graph: the weight it reads, ggml's name of the op, the weight's [K, N, E], whether the input is to
be read in F32, and whether nothing is computed since the one before but what the split back end keeps cut."""

HEADS, BESIDE = {"attn_q", "attn_k", "attn_v"}, {"ffn_gate", "ffn_up", "ffn_down"}
VIEWS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")

SRC1_PREC, PREC_F32 = 3, 10  # where ggml_prec_set_src notes it for src[1], and GGML_PREC_F32


def adjoining(graph: Iterable[tuple[str, bool]]) -> set[str]:
    """Which of these operators in graph order adjoin the one before, as each is said to: of attention, and of an FFN
    beside attention's output, but for the last layer, whose FFN sees fewer tokens."""
    split = [(tensor_role(name), name, adjoins) for name, adjoins in graph]
    last, found = max(role.layer or 0 for role, _, _ in split), set()
    for (before, *_), (role, name, adjoins) in pairwise(split):
        roles = {before.role, role.role}
        beside = "attn_output" in roles and roles & BESIDE and role.layer != last
        if adjoins and before.layer == role.layer and (beside or roles <= HEADS):
            found.add(name)
    return found


@contextlib.contextmanager
def tracing() -> Iterator[Callable[[Path], list[Traced]]]:
    """Give a function that lists the mul-mats of a one-token decode on the CPU that read a weight, in graph order. One
    child process decodes all models, of which none may kill llama.cpp."""
    from ggml_bridge.child import Child

    child = Child("operator_trace", {"PYTHONPATH": str(Path(__file__).parent)})

    def trace(path: Path) -> list[Traced]:
        rows = child.ask({"path": str(path)}, timeout_s=600.0)["operators"]
        return [(name, op, tuple(shape), in_f32, adjoins) for name, op, shape, in_f32, adjoins in rows]

    try:
        yield trace
    finally:
        child.end()


def _decode_traced(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    """The child's side. ValueError where llama.cpp refuses."""
    weights = frozenset(tensor.name for tensor in read_gguf(request["path"]).tensors)
    found: list[Traced] = []
    adjoins = False

    def is_weight(tensor: Any) -> bool:
        return bool(tensor) and tensor.contents.name.decode("ascii", "replace") in weights

    def on_node(op: str, node: Any, ask: bool) -> bool:
        nonlocal adjoins
        if not ask:
            return False
        if op in ("MUL_MAT", "MUL_MAT_ID"):
            weight = weight_of(node)
            name = weight.name.decode("ascii", "replace")
            if name in weights:
                in_f32 = node.op_params[SRC1_PREC] == PREC_F32
                found.append((name, op, (weight.ne[0], weight.ne[1], weight.ne[2]), in_f32, adjoins))
                adjoins = True
                return False
        has_parameter = op in ("ADD", "MUL") and is_weight(node.src[1])  # a bias or a scale
        adjoins = adjoins and (op in VIEWS or op == "CLAMP" or has_parameter)
        return False  # never stop at a node

    with traced(request["path"], on_node, 32) as context:
        decode(context, [0])
    return {"operators": found}


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    child_main(_decode_traced)
