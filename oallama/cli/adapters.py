"""LoRA adapters behind `--`: checked against the model, and counted in a plan's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oallama.cli.help import passed_options
from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import DEFAULT_UBATCH
from oallama.run.server_options import adapter_paths

if TYPE_CHECKING:
    from oallama.model.adapter import Adapter
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

WHAT = "LoRA"


def adapters_for(placer: Placer) -> list[Adapter]:
    """Return the requested adapters. Raises ModelFileError, UsageError for another model's adapter."""
    paths = adapter_paths(passed_options())
    if not paths:
        return []
    from oallama.model.adapter import read_adapter

    adapters, known = [read_adapter(path) for path in paths], set(placer.tensor_names)
    for adapter in adapters:
        if unknown := next((name for name in adapter.n_bytes if name not in known), None):
            raise UsageError(f"{adapter.path}: the model has no weight {unknown}; use an adapter of this model")
    return adapters


def placer_beside_adapters(placer: Placer) -> Placer:
    """Return a placer that reserves room on the device for the adapters, as if all of their weights were there. Raises
    DoesNotFit, and as adapters_for and a no_alloc load."""
    from oallama.placer.stock import memory_cap, stock_load

    adapters = adapters_for(placer)
    n_bytes = sum(sum(adapter.n_bytes.values()) for adapter in adapters)
    if not n_bytes or not placer.has_device:
        return placer
    limit = memory_cap(placer, stock_load(placer, DEFAULT_UBATCH, DEFAULT_UBATCH, DEFAULT_UBATCH)).device_bytes or 0
    return placer.keeping_free(n_bytes, limit, WHAT, "use fewer, or more --vram")


def check_adapters(placer: Placer, plan: Plan) -> None:
    """Raise DoesNotFit if a given plan leaves too little room for the adapters, and as adapters_for."""
    on_device = [row.name for row in plan.operators if row.backend == "GPU"]
    n_bytes = sum(adapter.device_bytes(on_device) for adapter in adapters_for(placer))
    if n_bytes > max(0, plan.memory.spare):
        raise DoesNotFit(n_bytes, max(0, plan.memory.spare), plan.device, WHAT, "plan anew with less --vram")
