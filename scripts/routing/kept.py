"""A file of routing as what is known of a model: counts of its first half, as `oallama profile --routing` has them."""

from __future__ import annotations

from oallama.core.routing import Routing as Counts
from oallama.profile.routing import Traffic, counted, halves, unknown_routing
from routing.table import Routing


def first_and_second(routing: Routing) -> tuple[Routing, Routing]:
    """Each layer's tokens in halves. Raises ValueError where a half has none."""
    if any(len(rows) < 2 for rows in routing.values()):
        raise ValueError("two tokens of each layer at least make two halves")
    cuts = {layer: len(rows) // 2 for layer, rows in routing.items()}
    return (
        {layer: rows[: cuts[layer]] for layer, rows in routing.items()},
        {layer: rows[cuts[layer] :] for layer, rows in routing.items()},
    )


def counts_of(routing: Routing, fingerprint: str, n_layer: int, n_expert: int, n_used: int) -> Counts:
    """Of a model's layers, as decode and as prompts alike, in two recordings. Raises ValueError for rows of another
    model."""
    import numpy as np

    own = {layer: rows for layer, rows in routing.items() if layer < n_layer}
    if not own or any(len(row) != n_used or max(row) >= n_expert for rows in own.values() for row in rows):
        raise ValueError(f"the file is not of a model of {n_expert} experts, {n_used} a token")
    ids = {layer: [np.array(rows, np.int32)] for layer, rows in own.items()}
    counts = unknown_routing(fingerprint, n_expert, n_used)
    for half in halves([Traffic(ids, ids)]):
        counts = counted(counts, half)
    return counts
