"""Resources of a served placement: its device by llama-server's name, and counts of used experts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from oallama.cli.output import talk
from oallama.core.errors import ProfileError
from oallama.core.temporary import temporary_folder
from oallama.device.rpc_worker import RpcWorker
from oallama.placer import Placer
from oallama.profile.routing import unknown_routing
from oallama.profile.routing_store import read_routing, write_routing
from oallama.report.placement import Served
from oallama.run.learned_experts import learned_plan
from oallama.serve.uses import with_uses


@dataclass(frozen=True, slots=True)
class Needs:
    """device: as llama-server names it. worker: the one that is the device, if so. uses_file: where the plug-in leaves
    uses of hot experts; None where nobody counts."""

    placer: Placer
    device: str
    worker: RpcWorker | None
    uses_file: Path | None

    def named(self, served: Served) -> Served:
        """With the device's name where the plan uses it, `none` where it does not."""
        plan = served.plan
        uses = plan.n_gpu_layers > 0 or any(p.cc < 1 or p.hot_experts for p in plan.operators)
        return replace(served, plan=replace(plan, device=self.device if uses and plan.device != "none" else "none"))

    def lost(self) -> str | None:
        """Why the device is known to be lost, if so."""
        return None if self.worker is None or self.worker.alive() else "its worker process does not answer"

    def learned(self, served: Served) -> Served:
        """With the experts that are used by now in the places of hot ones."""
        if self.uses_file is None or not any(p.hot_experts for p in served.plan.operators):
            return served
        routing = read_routing(*_experts_of(self.placer))
        if routing is None:
            return served
        return replace(served, plan=learned_plan(served.plan, self.placer.operators, routing))


@contextlib.contextmanager
def needs_of(placer: Placer, learn_experts: bool) -> Iterator[Needs]:
    """A worker runs for the block, and uses are kept at its end."""
    with contextlib.ExitStack() as stack:
        worker, uses_file = None, None
        if placer.device.is_worker:
            worker = RpcWorker(placer.device)
            stack.callback(worker.kill)
            if worker.warning:
                talk(f"warning: {worker.warning}")
        device = str(placer.found_device) if worker is None else f"rpc://{worker.endpoint}"
        if learn_experts and placer.model.n_expert:
            folder = stack.enter_context(temporary_folder("oallama-routing-", Path(tempfile.gettempdir())))
            uses_file = folder / "uses"
            stack.callback(_keep_uses, placer, uses_file)
        yield Needs(placer, device, worker, uses_file)


def _keep_uses(placer: Placer, file: Path) -> None:
    """Add what the plug-in has counted to what is known of the model's routing."""
    shape = _experts_of(placer)
    known = read_routing(*shape) or unknown_routing(*shape)
    routing = with_uses(known, placer.operators, file)
    if routing != known:
        try:
            write_routing(routing)
        except ProfileError as error:
            talk(f"warning: {error}")


def _experts_of(placer: Placer) -> tuple[str, int, int]:
    model = placer.model
    return model.fingerprint, model.n_expert, model.n_expert_used
