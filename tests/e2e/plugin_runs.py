"""Models run by llama.cpp itself, with the split backend or without, beneath the engine: any operator may be given to
the backend there, also one that lies whole on one side."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from e2e.placed import Placed
from llama_cpp import llama_cpp as api

from oallama.core.types import Attention, Operator, OperatorPlacement
from oallama.device.load_params import LoadSettings, apply_context, load_bridge
from oallama.plan.patterns import escape
from oallama.plan.plugin_text import plugin_text
from oallama.run.generate import teacher_forced_logits
from oallama.run.weight_places import host_shape

Logits = npt.NDArray[np.float32]

N_CTX, N_UBATCH = 256, 64


def pattern_of(names: Sequence[str]) -> str:
    return f"^(?:{'|'.join(escape(name) for name in names)})$"


@contextlib.contextmanager
def loaded(
    path: Path, overrides: Sequence[tuple[str, int]] = (), devices: Sequence[int] = (), n_seq: int = 1, **params: Any
) -> Iterator[Any]:
    """A llama_context of the model with these (pattern, buffer type) and devices; one thread, nothing offloaded by
    llama.cpp's own choice. params: fields of llama_model_params."""
    model_params = api.llama_model_default_params()
    entries = (_Override * (len(overrides) + 1))()
    for entry, (pattern, buft) in zip(entries, overrides, strict=False):
        entry.pattern, entry.buft = pattern.encode(), buft
    listed = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
    model_params.devices = ctypes.cast(listed, ctypes.c_void_p)
    model_params.tensor_buft_overrides = ctypes.cast(entries, ctypes.c_void_p)
    model_params.n_gpu_layers = 0
    for name, value in params.items():
        setattr(model_params, name, value)
    model = api.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, path
    try:
        with context_of(path, model, n_seq) as context:
            yield context
    finally:
        api.llama_model_free(model)


@contextlib.contextmanager
def context_of(path: Path, model: Any, n_seq: int = 1, n_threads: int = 1) -> Iterator[Any]:
    params = api.llama_context_default_params()
    settings = LoadSettings(str(path), n_ctx=N_CTX, n_ubatch=N_UBATCH, attention=Attention("on"), n_threads=n_threads)
    apply_context(settings, params)
    params.n_seq_max, params.op_offload, params.kv_unified = n_seq, False, True
    context = api.llama_init_from_model(model, params)
    assert context, path
    try:
        yield context
    finally:
        api.llama_free(context)


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def logits_of(context: Any, tokens: Sequence[int]) -> Logits:
    """Teacher-forced logits [n_tokens, n_vocab] of one sequence, in micro-batches."""
    return teacher_forced_logits(context, tokens)


def logits_of_sequences(context: Any, sequences: Sequence[Sequence[int]]) -> Logits:
    """Logits [n_sequences, n_tokens, n_vocab] of sequences of one length, one token of each in every batch."""
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(api.llama_get_model(context)))
    n, length = len(sequences), len(sequences[0])
    out = np.empty((n, length, n_vocab), np.float32)
    batch = api.llama_batch_init(n, 0, 1)
    try:
        for position in range(length):
            batch.n_tokens = n
            for i, tokens in enumerate(sequences):
                batch.token[i], batch.pos[i], batch.logits[i] = tokens[position], position, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
            assert api.llama_decode(context, batch) == 0
            for i in range(n):
                out[i, position] = np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), shape=(n_vocab,))
    finally:
        api.llama_batch_free(batch)
    return out


@contextlib.contextmanager
def with_plugin(
    case: Placed,
    placements: Sequence[OperatorPlacement],
    given: Sequence[str],
    device: str,
    n_seq: int = 1,
    sum_bytes: int | None = 0,
    **params: Any,
) -> Iterator[Any]:
    """A llama_context whose operators `given` are the split backend's, cut as the placements of all operators say.

    device: a ggml device that is open. Host slices without a named layout are in the one llama.cpp would choose.
    sum_bytes: `sum` of the plan text. With 0 the few results of a tiny model's experts are added up too; None: as
    plans say it.
    """
    operators = [operator for operator in case.operators if operator.name in given]
    by_name = {placement.name: placement for placement in placements}
    chosen = [_with_layout(operator, by_name[operator.name]) for operator in operators]
    text = plugin_text(
        replace(case.plan, operators=tuple(chosen)), operators, case.model.n_layer, device, every_operator=True
    )
    text += "" if sum_bytes is None else f"sum {sum_bytes}\n"
    with load_bridge().split().plan(text) as plan:
        overrides = [(pattern_of(given), plan.buft)]
        params["load_mode"] = api.LLAMA_LOAD_MODE_NONE
        with loaded(Path(case.model.path), overrides, n_seq=n_seq, **params) as context:
            assert plan.problems() == (True, [])
            assert [slice.name for slice in plan.slices() if slice.loaded] == [operator.name for operator in operators]
            yield context


def _with_layout(operator: Operator, placement: OperatorPlacement) -> OperatorPlacement:
    if placement.cc == 0 or placement.layout is not None:
        return placement
    bridge, shape = load_bridge(), host_shape(operator, placement)
    used = operator.n_expert_used if operator.op == "MUL_MAT_ID" else 0
    layouts = bridge.cpu_layouts()
    return replace(placement, layout=next(x for x in layouts if bridge.layout_supports(x, operator.type, *shape, used)))
