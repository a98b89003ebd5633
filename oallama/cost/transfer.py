"""Seconds that crossings between the CPU and a device cost.

One crossing costs what the profiled link says for its bytes (ScheInfer Eq. 3: t = α + β·bytes); each split on the
device adds what ggml's scheduler needs beside the two copies, taken from the profiled boundary (one excursion host ->
device -> host).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oallama.core.profile import LinearFit, Profile
from oallama.cost.graph import Crossings
from oallama.cost.passes import Pass


@dataclass(frozen=True, slots=True)
class TransferRates:
    """α and β of both directions and the fixed cost of a device split, in seconds and seconds per byte."""

    copy_in: LinearFit
    copy_out: LinearFit
    split_s: float
    launch_issue_s: float = 0.0  # of split_s, what passes before the thread that launches can go on

    @property
    def launch_s(self) -> float:
        """From then on, until the device computes."""
        return max(0.0, self.split_s - self.launch_issue_s)

    def seconds(self, moved: Crossings, n_tokens: int, n_outputs: int) -> float:
        """One pass over n_tokens, of which n_outputs give logits."""
        return (
            moved.device_splits * self.split_s
            + moved.copies_in * self.copy_in.alpha_s
            + moved.copies_out * self.copy_out.alpha_s
            + (n_tokens * moved.bytes_in_per_token + n_outputs * moved.bytes_in_per_output)
            * self.copy_in.beta_s_per_byte
            + (n_tokens * moved.bytes_out_per_token + n_outputs * moved.bytes_out_per_output)
            * self.copy_out.beta_s_per_byte
        )

    def over(self, moved: Crossings, passes: Sequence[Pass]) -> float:
        return sum(p.count * self.seconds(moved, p.n_tokens, p.n_outputs) for p in passes)


NO_TRANSFER = TransferRates(LinearFit(0.0, 0.0, 1.0), LinearFit(0.0, 0.0, 1.0), 0.0)


def transfer_rates(profile: Profile) -> TransferRates:
    """The rates of a profile; without a device, nothing counts.

    Activations cross from and to pinned memory where the device has any: llama.cpp that was told of a device keeps the
    CPU's activations there, and the split backend goes through staging there. A profile without d2h_pinned is priced as
    it was measured, in pageable memory.
    """
    if not profile.link:
        return NO_TRANSFER
    if "d2h_pinned" in profile.link:
        copy_in, copy_out = profile.link["h2d_pinned"], profile.link["d2h_pinned"]
    else:
        copy_in = profile.link.get("h2d_pageable") or profile.link["h2d_pinned"]
        copy_out = profile.link["d2h"]
    issue_s = profile.launch_issue_s or 0.0
    if profile.boundary is None:
        return TransferRates(copy_in, copy_out, profile.launch_s, issue_s)
    split_s = max(0.0, profile.boundary.alpha_s - copy_in.alpha_s - copy_out.alpha_s)
    return TransferRates(copy_in, copy_out, split_s, issue_s)


def weight_stream(profile: Profile, mapped: bool = True) -> LinearFit | None:
    """The link llama.cpp streams plain host weights over for large batches. A mapped file is pageable memory; where it
    is read instead (beside weights of the split back end), weights lie in the device's pinned memory if it has any.
    None for devices that take no such work (ggml's RPC and CPU devices have no offload_op)."""
    if profile.fingerprint.get("device_backend") in (None, "RPC", "CPU"):
        return None
    pinned = None if mapped or not profile.is_pinned else profile.link.get("h2d_pinned")
    return pinned or profile.link.get("h2d_pageable")
