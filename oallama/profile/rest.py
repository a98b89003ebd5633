"""Measures what a transformer layer computes beside its weight-bearing mul-mats, with flash attention and without."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from oallama.core.types import RestCase, RestShape
from oallama.profile.merge import missing_rest
from oallama.profile.session import Fragment, Session, Task
from oallama.profile.store import rest_to_json
from oallama.profile.wanted import rest_skipped

GRAPH_TOKENS = 64  # a graph has as many layers as make about so many tokens, so that a launch is a small part of it
MAX_GRAPH_LAYERS = 8
REST_CAP = 2.0  # time cap, in caps of a decode case


def rest_tasks(session: Session) -> list[Task]:
    """One task for each batch size, KV depth and way of attention that is missing on the CPU and on the device."""
    return [
        session.task(
            f"{device} rest of a layer at {n_tokens} tokens, KV {n_kv}{_way(shape)}",
            REST_CAP,
            device,
            partial(_measure, session, device, n_tokens, n_kv, shape),
        )
        for device in session.devices
        for n_tokens, n_kv, shape in missing_rest(session.profile, session.want, device)
    ]


def _measure(session: Session, device: str, n_tokens: int, n_kv: int, shape: RestShape) -> Fragment:
    """Time one case, or say why not."""
    from ggml_bridge import OutOfMemory, Unsupported

    policy = replace(
        session.policy, time_cap_s=REST_CAP * session.policy.time_cap_s, min_repeats=min(3, session.policy.min_repeats)
    )
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
            shape.flash_attn,
            shape.type_k.upper(),
            shape.type_v.upper(),
        )
    except (OutOfMemory, Unsupported) as error:
        return {"skipped": [asdict(rest_skipped(device, n_tokens, n_kv, shape, str(error)))]}
    timing = session.timed(timer, policy)
    return {"rest": [rest_to_json(RestCase(device, n_tokens, n_kv, timing.seconds, timing.samples, shape))]}


def _way(shape: RestShape) -> str:
    return "" if shape.flash_attn else ", no flash attention"
