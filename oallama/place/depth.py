"""What a token of a plan is predicted to take by how much context it sees. Pure.

Operators take the same time at any depth; attention, which is part of what a layer takes beside them, does not.
"""

from __future__ import annotations

from collections.abc import Callable

from oallama.core.profile import Profile
from oallama.core.types import FlashAttention, PlanRecord, Workload
from oallama.cost.passes import Pass, passes
from oallama.place.attention import rest_total
from oallama.profile.wanted import KV_STEP

SLOWER = 0.9  # share of the rate that is left where it counts as another one


def planned_depth(load: Workload) -> int:
    """The depth that a plan's TPOT is predicted for, in tokens."""
    return passes(load, "decode")[0].n_kv


def token_seconds(
    profile: Profile, flash_attn: FlashAttention, n_layer: int, record: PlanRecord, depth: int
) -> float | None:
    """Predicted seconds of one token behind `depth` others. None where the plan predicts nothing, or the profile has
    no attention of this way."""
    if record.predicted is None or not profile.rest:
        return None
    on_device = max(0, record.n_gpu_layers - 1)  # llama.cpp counts the output as a layer
    layers = (n_layer - on_device, on_device)

    def rest_s(at: int) -> float:
        return rest_total(profile, flash_attn, layers, (Pass(1, at, 1),))

    return max(0.0, record.predicted.tpot_s + rest_s(depth) - rest_s(planned_depth(record.workload)))


def slower_from(seconds: Callable[[int], float], depth: int, n_ctx: int) -> int | None:
    """The least depth, in steps of the KV cache beyond `depth`, from which on less than SLOWER of the rate at `depth`
    is left; None where that is not so within the context."""
    limit = seconds(depth) / SLOWER
    first = depth // KV_STEP + 1
    return next((n * KV_STEP for n in range(first, n_ctx // KV_STEP + 1) if seconds(n * KV_STEP) > limit), None)
