"""Models described by their shape, without a file: the operators that the cost model prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import gguf
from experiments.inputs import InputError, read_toml, record
from model_shapes import attention_and_ffn

from oallama.core.codec import Count32, Size32
from oallama.core.types import ModelInfo, Operator


@dataclass(frozen=True)
class Sizes:
    """Of a described model, as TOML names them. source: where they are from."""

    n_layer: Size32
    n_embd: Size32
    n_head: Size32
    n_head_kv: Size32
    head_dim: Size32
    n_ff: Size32
    n_vocab: Size32
    type: str
    output_type: str = ""  # as the others
    n_expert: Count32 = 0
    n_expert_used: Count32 = 0
    source: str = ""


@dataclass(frozen=True)
class CardModel:
    """What a described model is to the product."""

    name: str
    info: ModelInfo
    operators: tuple[Operator, ...]


def read_models(path: Path) -> dict[str, CardModel]:
    """By the names that the tables use. Raises InputError."""
    made: dict[str, CardModel] = {}
    for name, table in read_toml(path).items():
        where = f"{path}: {name}"
        if isinstance(table, dict) and "same_as" in table:
            if table["same_as"] not in made:
                raise InputError(f"{where} is the same as {table['same_as']!r}, which is not above it")
            made[name] = made[table["same_as"]]
        else:
            made[name] = model_of(name, _checked(record(Sizes, table, where), where))
    if not made:
        raise InputError(f"{path} describes no model")
    return made


def _checked(sizes: Sizes, where: str) -> Sizes:
    """With the output's type. Raises InputError."""
    if sizes.n_head % sizes.n_head_kv:
        raise InputError(f"{where}: n_head must be a multiple of n_head_kv")
    if sizes.n_expert_used > sizes.n_expert or (sizes.n_expert > 0) != (sizes.n_expert_used > 0):
        raise InputError(f"{where}: n_expert_used must be some of n_expert")
    full = replace(sizes, output_type=sizes.output_type or sizes.type)
    for name in (full.type, full.output_type):
        if name not in gguf.GGMLQuantizationType.__members__:
            raise InputError(f"{where}: {name!r} is not a ggml type")
    return full


def model_of(name: str, sizes: Sizes) -> CardModel:
    """Llama's graph, or with experts Qwen3-MoE's."""
    operators = tuple(_operators(sizes))
    info = ModelInfo(
        path=name, arch="qwen3moe" if sizes.n_expert else "llama", name=name, n_layer=sizes.n_layer,
        n_embd=sizes.n_embd, n_ff=sizes.n_ff, n_head=sizes.n_head, n_head_kv=sizes.n_head_kv,
        n_embd_head_k=sizes.head_dim, n_embd_head_v=sizes.head_dim,
        n_expert=sizes.n_expert, n_expert_used=sizes.n_expert_used, n_vocab=sizes.n_vocab, n_ctx_train=0,
        file_bytes=sum(operator.bytes for operator in operators), fingerprint="",
    )  # fmt: skip
    return CardModel(name, info, operators)


def _operators(sizes: Sizes) -> Iterator[Operator]:
    matrices = attention_and_ffn(
        sizes.n_embd, sizes.n_ff, sizes.n_head, sizes.n_head_kv, sizes.head_dim, sizes.n_expert, sizes.n_ff
    )
    for layer in range(sizes.n_layer):
        for role, ne in matrices.items():
            routed = len(ne) > 2
            shape = (ne[0], ne[1], ne[2] if routed else 1)
            kind = "F32" if role == "ffn_gate_inp" else sizes.type
            yield _operator(
                f"blk.{layer}.{role}.weight", layer, role, kind, shape, sizes.n_expert_used if routed else 0
            )
    yield _operator("output.weight", None, "output", sizes.output_type, (sizes.n_embd, sizes.n_vocab, 1))


def _operator(
    name: str, layer: int | None, role: str, type_name: str, shape: tuple[int, int, int], used: int = 0
) -> Operator:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    k, n, e = shape
    op: Literal["MUL_MAT", "MUL_MAT_ID"] = "MUL_MAT_ID" if used else "MUL_MAT"
    return Operator(name, layer, role, op, type_name, shape, k * n * e // block * block_bytes,
                    used / e if used else 1.0, used or 1)  # fmt: skip
