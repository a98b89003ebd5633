"""--mmproj: a vision projector beside a plan, counted in its memory breakdown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from oallama.cli.help import Group
from oallama.cli.records import as_record, option_field
from oallama.core.types import Attention
from oallama.core.units import format_bytes

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.model.projector import Projector
    from oallama.placer import Placer
    from oallama.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class ProjectorOptions:
    """The projector's file, and whether it goes to the device; None: if it fits there."""

    mmproj: str | None = option_field("-mm", "--mmproj", type=click.Path(), metavar="FILE", group=Group.MODEL,
        advanced=True,
        help="Vision projector of the model, a GGUF named mmproj-…; its memory is planned for.")  # fmt: skip
    offload: bool | None = option_field("--mmproj-offload/--no-mmproj-offload", group=Group.PLACEMENT, advanced=True,
        show_default="on the device if the plan leaves room",
        help="Reserve device memory for the projector, or run it on the CPU.")  # fmt: skip

    def read(self) -> Projector | None:
        """The projector. Raises ModelFileError."""
        from oallama.model.projector import read_projector

        return None if self.mmproj is None else read_projector(self.mmproj)

    def with_room(self, placer: Placer, workload: Workload) -> Placer:
        """Return a placer that reserves room on the device for the projector, if requested; else the same placer.
        Raises DoesNotFit, and as reading the device's free memory."""
        from oallama.bench.prepare import setting_of

        projector = self.read()
        if projector is None or not self.offload or not placer.has_device:
            return placer
        limit = setting_of(placer, workload.n_ctx, workload.n_ubatch).cap.device_bytes or 0
        needed = projector.n_bytes(placer.options.flash_attn != "off")
        return placer.keeping_free(needed, limit, "the vision projector", "leave it on the CPU (--no-mmproj-offload)")

    def placed(self, plan: Plan, memory_kept: bool) -> PlacedProjector | None:
        """Place the requested projector beside a plan; None if none is requested. memory_kept: the plan was made with
        room for it. Raises ModelFileError."""
        if (projector := self.read()) is None:
            return None
        needed = projector.n_bytes((plan.attention or Attention()).flash_attn != "off")
        uses_device = plan.device != "none" and plan.memory.limit > 0 and not plan.memory.devices
        on_device = uses_device and (plan.memory.spare >= needed if self.offload is None else self.offload)
        why = ""
        if uses_device and self.offload is None:
            why = f", as the plan leaves {format_bytes(max(0, plan.memory.spare))} free"
        elif on_device and memory_kept:
            why = ", in reserved memory"
        weights, side = projector.weight_bytes, "on the device" if on_device else "on the CPU"
        note = (
            f"the vision projector takes {format_bytes(weights)}, and {format_bytes(needed - weights)} to encode a "
            f"picture of {projector.edge} x {projector.edge}, {side}{why}"
        )
        return PlacedProjector(projector.path, needed, on_device, note)


@dataclass(frozen=True, slots=True)
class PlacedProjector:
    """A projector beside a plan, and its memory there. note: a sentence with the projector's place, the reason for it,
    and its memory."""

    path: str
    n_bytes: int
    on_device: bool
    note: str

    def noted(self, plan: Plan) -> Plan:
        """The plan with that note."""
        return replace(plan, notes=(*plan.notes, self.note))


NO_PICTURES = ProjectorOptions()

projector_options = as_record("pictures", ProjectorOptions)
