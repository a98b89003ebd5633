"""Measures what a transformer layer computes beside its weight-bearing mul-mats."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from oallama.core.types import RestCase
from oallama.profile.merge import missing_rest
from oallama.profile.session import Fragment, Session, Task
from oallama.profile.store import rest_to_json
from oallama.profile.wanted import rest_skipped

GRAPH_TOKENS = 64  # a graph has as many layers as make about so many tokens, so that a launch is a small part of it
MAX_GRAPH_LAYERS = 8
REST_CAP = 2.0  # time cap, in caps of a decode case


def rest_tasks(session: Session) -> list[Task]:
    """One task for each batch size and KV depth that is missing on the CPU and on the device."""
    return [
        session.task(
            f"{device} rest of a layer at {n_tokens} tokens, KV {n_kv}",
            REST_CAP,
            device,
            partial(_measure, session, device, n_tokens, n_kv),
        )
        for device in session.devices
        for n_tokens, n_kv in missing_rest(session.profile, session.want, device)
    ]


def _measure(session: Session, device: str, n_tokens: int, n_kv: int) -> Fragment:
    """With flash attention where the device has it, as llama.cpp does; else without."""
    from ggml_bridge import OutOfMemory, Unsupported

    policy = replace(
        session.policy, time_cap_s=REST_CAP * session.policy.time_cap_s, min_repeats=min(3, session.policy.min_repeats)
    )
    reason = ""
    for flash_attn in (True, False):
        shape = replace(session.want.rest_shape, flash_attn=flash_attn)
        try:
            timer = session.bridge.layer_rest(
                session.ggml_name(device),
                n_tokens,
                n_kv,
                shape.n_embd,
                shape.n_head,
                shape.n_head_kv,
                shape.n_embd_head_k,
                shape.n_embd_head_v,
                shape.n_ff,
                max(1, min(session.want.n_layer, MAX_GRAPH_LAYERS, GRAPH_TOKENS // n_tokens)),
                session.n_threads,
                flash_attn,
            )
        except (OutOfMemory, Unsupported) as error:
            reason = str(error)
            continue
        timing = session.timed(timer, policy)
        rest = RestCase(device, n_tokens, n_kv, timing.seconds, timing.samples, shape)
        return {"rest": [rest_to_json(rest)]}
    return {"skipped": [asdict(rest_skipped(device, n_tokens, n_kv, session.want.rest_shape, reason))]}
