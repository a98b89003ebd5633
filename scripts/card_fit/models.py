"""Models described by their shape, without a file: the operators that the cost model prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
from experiments.toml_file import TomlError, read_toml

from card_fit.tables import TableError
from oallama.core.types import ModelInfo, Operator

SIZES = ("n_layer", "n_embd", "n_head", "n_head_kv", "head_dim", "n_ff", "n_vocab")
EXPERTS = ("n_expert", "n_expert_used")
TEXTS = ("type", "output_type", "source", "same_as")


@dataclass(frozen=True)
class Model:
    """What a described model is to the product."""

    name: str
    info: ModelInfo
    operators: tuple[Operator, ...]


def read_models(path: Path) -> dict[str, Model]:
    """By the names that the tables use. Raises TableError."""
    try:
        tables = read_toml(path)
    except TomlError as error:
        raise TableError(str(error)) from None
    made: dict[str, Model] = {}
    for name, table in tables.items():
        where = f"{path}: {name}"
        if not isinstance(table, dict):
            raise TableError(f"{where} is no table of a model's sizes")
        if "same_as" in table:
            if table["same_as"] not in made:
                raise TableError(f"{where} is the same as {table['same_as']!r}, which is not above it")
            made[name] = made[table["same_as"]]
        else:
            made[name] = model_of(name, _checked(table, where))
    if not made:
        raise TableError(f"{path} describes no model")
    return made


def _checked(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The table with what may be left out filled in."""
    unknown = sorted(set(table) - {*SIZES, *EXPERTS, *TEXTS})
    if unknown:
        raise TableError(
            f"{where} has {unknown[0]!r}, which is not known: it takes {', '.join(SIZES + EXPERTS + TEXTS)}"
        )
    full = {"n_expert": 0, "n_expert_used": 0, "output_type": table.get("type"), **table}
    for name in SIZES + EXPERTS:
        if type(full.get(name)) is not int or not (name in EXPERTS or full[name] > 0) or not 0 <= full[name] < 2**31:
            raise TableError(f"{where}: {name} is {full.get(name)!r}, not a size")
    if full["n_head"] % full["n_head_kv"]:
        raise TableError(f"{where}: n_head must be a multiple of n_head_kv")
    if not 0 <= full["n_expert_used"] <= full["n_expert"] or (full["n_expert"] > 0) != (full["n_expert_used"] > 0):
        raise TableError(f"{where}: n_expert_used must be some of n_expert")
    for name in ("type", "output_type"):
        if full[name] not in gguf.GGMLQuantizationType.__members__:
            raise TableError(f"{where}: {name} is {full[name]!r}, not a ggml type")
    return full


def model_of(name: str, shape: dict[str, Any]) -> Model:
    """Llama's graph, or with experts Qwen3-MoE's."""
    operators = tuple(_operators(shape))
    info = ModelInfo(
        path=name,
        arch="qwen3moe" if shape["n_expert"] else "llama",
        name=name,
        n_layer=shape["n_layer"],
        n_embd=shape["n_embd"],
        n_ff=shape["n_ff"],
        n_head=shape["n_head"],
        n_head_kv=shape["n_head_kv"],
        n_embd_head_k=shape["head_dim"],
        n_embd_head_v=shape["head_dim"],
        n_expert=shape["n_expert"],
        n_expert_used=shape["n_expert_used"],
        n_vocab=shape["n_vocab"],
        n_ctx_train=0,
        file_bytes=sum(operator.bytes for operator in operators),
        fingerprint="",
    )
    return Model(name, info, operators)


def _operators(shape: dict[str, Any]) -> Iterator[Operator]:
    n_embd, n_ff = shape["n_embd"], shape["n_ff"]
    n_q, n_kv = (shape[heads] * shape["head_dim"] for heads in ("n_head", "n_head_kv"))
    n_expert = shape["n_expert"]
    attention = (
        ("attn_q", n_embd, n_q),
        ("attn_k", n_embd, n_kv),
        ("attn_v", n_embd, n_kv),
        ("attn_output", n_q, n_embd),
    )
    ffn = (("ffn_gate", n_embd, n_ff), ("ffn_up", n_embd, n_ff), ("ffn_down", n_ff, n_embd))
    for layer in range(shape["n_layer"]):
        for role, k, n in attention:
            yield _operator(f"blk.{layer}.{role}.weight", layer, role, shape["type"], (k, n, 1))
        if n_expert:
            name = f"blk.{layer}.ffn_gate_inp.weight"
            yield _operator(name, layer, "ffn_gate_inp", "F32", (n_embd, n_expert, 1))
        for role, k, n in ffn:
            role += "_exps" if n_expert else ""
            name = f"blk.{layer}.{role}.weight"
            yield _operator(name, layer, role, shape["type"], (k, n, n_expert or 1), shape["n_expert_used"])
    yield _operator("output.weight", None, "output", shape["output_type"], (n_embd, shape["n_vocab"], 1))


def _operator(
    name: str, layer: int | None, role: str, type_name: str, shape: tuple[int, int, int], used: int = 0
) -> Operator:
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    k, n, e = shape
    op: Literal["MUL_MAT", "MUL_MAT_ID"] = "MUL_MAT_ID" if used else "MUL_MAT"
    return Operator(name, layer, role, op, type_name, shape, k * n * e // block * block_bytes,
                    used / e if used else 1.0, used or 1)  # fmt: skip
