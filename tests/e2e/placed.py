"""Plans made by hand for the engine's tests: which operators go to the device is said by a predicate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from oallama.core.types import MemoryLedger, ModelInfo, Operator, OperatorPlacement, Predicted, Workload
from oallama.device.load_params import LoadSettings
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.memory import ProbeResult, probe_memory
from oallama.model.operators import operators
from oallama.plan.patterns import host_patterns
from oallama.plan.plan import Plan

Where = Callable[[Operator], bool]

ALL_LAYERS = 999


@dataclass(frozen=True)
class Placed:
    """A model, its plan, and what the probe said of it."""

    model: ModelInfo
    operators: tuple[Operator, ...]
    tensor_names: tuple[str, ...]
    plan: Plan
    request: LoadSettings
    probed: ProbeResult


def placed(
    path: Path, device: str = "none", on_device: Where = lambda op: True, n_ctx: int = 256, layout: str | None = None
) -> Placed:
    """A plan for `path` with the chosen operators on the device, its ledger filled by a probe."""
    gguf = read_gguf(path)
    model, ops, names = model_info(gguf), operators(gguf), tuple(tensor.name for tensor in gguf.tensors)
    there = {op.name: device != "none" and on_device(op) for op in ops}
    placements = tuple(
        OperatorPlacement(name=name, gg=float(gg), cg=0.0, cc=float(not gg), layout=None if gg else layout)
        for name, gg in there.items()
    )
    request = LoadSettings(
        path=model.path,
        device=device,
        n_ctx=n_ctx,
        n_ubatch=64,
        n_gpu_layers=0 if device == "none" else ALL_LAYERS,
        host_patterns=() if device == "none" and layout is None else host_patterns(ops, placements, names),
        n_threads=1,
    )
    probed = probe(request)
    ledger = MemoryLedger(
        capacity=probed.device_total,
        fill=0.9,
        limit=probed.device_total,
        weights_gpu=probed.on_device("model"),
        weights_host=probed.on_host("model"),
        kv=probed.on_device("context"),
        compute=probed.on_device("compute"),
        staging=0,
        spare=0,
    )
    record = Plan(
        model_path=model.path,
        model_fingerprint=model.fingerprint,
        machine_fingerprint="",
        device=device,
        policy="oato",
        workload=Workload(n_prompt=8, n_gen=8, n_ctx=n_ctx, n_ubatch=64),
        operators=placements,
        n_gpu_layers=request.n_gpu_layers,
        memory=ledger,
        predicted=Predicted(ttft_s=0.0, tpot_s=0.0, total_s=0.0),
    )
    return Placed(model, ops, names, record, request, probed)


def with_ledger(plan: Plan, **changes: int) -> Plan:
    """The same plan with other numbers in its ledger."""
    return replace(plan, memory=replace(plan.memory, **changes))


@functools.cache
def probe(request: LoadSettings) -> ProbeResult:
    """A dry load, made once."""
    return probe_memory(request)
