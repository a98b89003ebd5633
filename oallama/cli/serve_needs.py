"""Resources of a served placement: its device by llama-server's name, and counts of used experts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from oallama.cli.output import talk
from oallama.core.errors import ProfileError
from oallama.device.rpc_worker import RpcWorker
from oallama.placer import Placer
from oallama.profile.routing import unknown_routing
from oallama.profile.routing_store import read_routing, write_routing
from oallama.report.placement import Served
from oallama.run.learned_experts import learned_plan
from oallama.serve.uses import with_uses

Change = Callable[[Served], Served]


@dataclass(frozen=True, slots=True)
class Needs:
    """named: gives the device the name by which llama-server knows it; lost: why it is known to be lost, if so.
    learned: puts experts that are used by now into the places of hot ones; uses_file: where the plug-in leaves their
    uses; None where nobody counts."""

    named: Change
    lost: Callable[[], str | None]
    learned: Change
    uses_file: Path | None


@contextlib.contextmanager
def needs_of(placer: Placer, learn_experts: bool) -> Iterator[Needs]:
    """A worker runs for the block, and uses are kept at its end."""
    with _device(placer) as (named, lost), _learning(placer, learn_experts) as (uses_file, learned):
        yield Needs(named, lost, learned, uses_file)


@contextlib.contextmanager
def _device(placer: Placer) -> Iterator[tuple[Change, Callable[[], str | None]]]:
    """What names the device of a placement as another program knows it, and why the device is known to be lost, if so.
    A worker runs for the block."""

    def of(device: str) -> Change:
        def named(served: Served) -> Served:
            plan = served.plan
            uses = plan.device != "none" and (
                plan.n_gpu_layers > 0 or any(p.cc < 1 or p.hot_experts for p in plan.operators)
            )
            return replace(served, plan=replace(plan, device=device if uses else "none"))

        return named

    spec = placer.device
    if not spec.is_worker:
        yield of(str(placer.found_device)), lambda: None
        return
    worker = RpcWorker(spec)
    if worker.warning:
        talk(f"warning: {worker.warning}")
    try:
        lost = "its worker process does not answer"
        yield of(f"rpc://{worker.endpoint}"), lambda: None if worker.alive() else lost
    finally:
        worker.kill()


@contextlib.contextmanager
def _learning(placer: Placer, asked: bool) -> Iterator[tuple[Path | None, Change]]:
    """Where llama-server's plug-in leaves the uses of hot experts, which are kept at the end; and what puts those that
    are used by what is known now into a placement."""
    model = placer.model
    if not asked or not model.n_expert:
        yield None, lambda served: served
        return
    shape = (model.fingerprint, model.n_expert, model.n_expert_used)

    def learned(served: Served) -> Served:
        routing = read_routing(*shape) if any(p.hot_experts for p in served.plan.operators) else None
        if routing is None:
            return served
        return replace(served, plan=learned_plan(served.plan, placer.operators, routing))

    with tempfile.TemporaryDirectory(prefix="oallama-uses-") as folder:
        file = Path(folder) / "uses"
        try:
            yield file, learned
        finally:
            before = read_routing(*shape) or unknown_routing(*shape)
            after = with_uses(before, placer.operators, file)
            if after != before:
                try:
                    write_routing(after)
                except ProfileError as error:
                    talk(f"warning: {error}")
