"""What a search of slices finds: the cut of every block, what the device holds of them, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import Phase, Workload
from oallama.cost.block_cost import BlockCost, Cut
from oallama.place.cuts import Table


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The cuts of every block, and what they take."""

    layers: tuple[tuple[BlockCost, Cut], ...]
    token_assignment: Table
    kept_twice: bool  # CC lies in its fast layout and in the plain one, which is streamed for n_g
    weights_bytes: int  # of GG
    staging_bytes: int  # the ring of slots for streamed weights, and activations
    prefill_s: float  # blocks, and what lies between them, over the workload's prompt
    decode_s: float  # of one token
    short: bool = False  # more device memory would have changed it

    def total_s(self, load: Workload) -> float:
        return self.prefill_s + load.n_gen * self.decode_s

    def seconds(self, load: Workload, phase: Phase) -> float:
        """Over the passes of a phase."""
        return {"decode": self.decode_s, "prefill": self.prefill_s, "mixed": self.total_s(load)}[phase]

    @property
    def streams(self) -> bool:
        return bool(self.token_assignment) or any(cut.cg for _, cut in self.layers)

    @property
    def is_empty(self) -> bool:
        """Nothing is sliced."""
        return not self.streams and all(cut.is_whole for _, cut in self.layers)

    @property
    def twice_bytes(self) -> int:
        """Host memory of the second copy of CC."""
        return self.cc_bytes if self.kept_twice else 0

    @property
    def cc_bytes(self) -> int:
        """Of what the CPU has and may be streamed for n_g."""
        return sum(
            of.block.bytes * cut.cc // of.block.extent for of, cut in self.layers if of.takes_n_g and not cut.n_hot
        )
