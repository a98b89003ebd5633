"""Resources of a served placement: its device by llama-server's name, and counts of used experts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oallama.cli.output import talk
from oallama.cli.routing import experts_of
from oallama.core.errors import ProfileError
from oallama.core.temporary import temporary_folder
from oallama.device.rpc_worker import start_worker
from oallama.placer import Placer
from oallama.profile.routing import unknown_routing
from oallama.profile.routing_store import read_routing, write_routing
from oallama.report.placement import Served
from oallama.serve.uses import with_uses

if TYPE_CHECKING:
    from ggml_bridge.rpc import RpcServer


@dataclass(frozen=True, slots=True)
class Needs:
    """device: as llama-server names it. worker: the one that is the device, if so. uses_file: where the plug-in leaves
    uses of hot experts; None where nobody counts."""

    placer: Placer
    device: str
    worker: RpcServer | None
    uses_file: Path | None

    def named(self, served: Served) -> Served:
        """With the device's name where the plan uses it, `none` where it does not."""
        plan = served.plan
        uses = plan.n_gpu_layers > 0 or any(p.cc < 1 or p.hot_experts for p in plan.operators)
        return replace(served, plan=replace(plan, device=self.device if uses and plan.device != "none" else "none"))

    def lost(self) -> str | None:
        """Why the device is known to be lost, if so."""
        return None if self.worker is None or self.worker.died() is None else "its worker process has ended"


@contextlib.contextmanager
def needs_of(placer: Placer, count_experts: bool) -> Iterator[Needs]:
    """Run a worker for the block where that is the device, and keep what was counted at its end. Raises UsageError
    where experts are to be counted of a model that has none."""
    with contextlib.ExitStack() as stack:
        worker, uses_file = None, None
        if placer.device.is_worker:
            worker = stack.enter_context(start_worker(placer.device))
        device = str(placer.found_device) if worker is None else f"rpc://{worker.endpoint}"
        if count_experts:
            experts_of(placer.model, "--count-experts")
            folder = stack.enter_context(temporary_folder("oallama-routing-", Path(tempfile.gettempdir())))
            uses_file = folder / "uses"
            stack.callback(_keep_uses, placer, uses_file)
        yield Needs(placer, device, worker, uses_file)


def _keep_uses(placer: Placer, file: Path) -> None:
    """Add what the plug-in has counted to what is known of the model's routing."""
    shape = experts_of(placer.model, "--count-experts")
    known = read_routing(*shape) or unknown_routing(*shape)
    routing = with_uses(known, placer.operators, file)
    if routing != known:
        try:
            write_routing(routing)
        except ProfileError as error:
            talk(f"warning: {error}")
