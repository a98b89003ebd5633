"""Milliseconds of a token, request by request, on an emulated device that follows a file of routing, with hot sets that
stay or that learn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routing.kept import counts_of
from routing.table import Routing, write_routing

PROMPT = list(range(1, 17))


@dataclass(frozen=True)
class TimedTrial:
    """first: tokens of the file that hot sets are planned from; the device follows the others. n_gen: of a request.
    learns: whether sets learn. vram, gpu_weights, profile: as Placer.load takes them."""

    model: str
    device: str
    first: int
    n_gen: int
    learns: bool
    vram: int | None = None
    gpu_weights: float | None = None
    profile: str | None = None


def timed(routing: Routing, timing: TimedTrial) -> Iterator[dict[str, Any]]:
    """One record a request, until the file is through. Counts go to the cache, as with `keep`. Raises ValueError for
    rows of another model, and where the plan has no hot experts; OallamaError."""
    from oallama.device.spec import parse_device
    from oallama.placer import Placer
    from oallama.profile.routing_store import write_routing as write_counts
    from oallama.run.learned_experts import Known

    model = Placer.load(timing.model, device="none").model
    shape = (model.fingerprint, model.n_layer, model.n_expert, model.n_expert_used)
    counts = counts_of({layer: rows[: timing.first] for layer, rows in routing.items()}, *shape)
    write_counts(counts)
    later = {layer: rows[timing.first :] for layer, rows in routing.items()}
    n_tokens = min(len(rows) for rows in later.values())
    with tempfile.TemporaryDirectory() as folder:
        write_routing(Path(folder) / "later.txt", later, "what the sets were not chosen from")
        device = f"{parse_device(timing.device).timed},routing={folder}/later.txt"
        placer = Placer.load(
            timing.model, device=device, vram=timing.vram, gpu_weights=timing.gpu_weights, profile=timing.profile
        )
        plan = placer.plan("experts", n_prompt=len(PROMPT), n_gen=timing.n_gen)
        n_hot = sum(len(placement.hot_experts) for placement in plan.operators)
        if not n_hot:
            raise ValueError("the plan has no hot experts: give the device less memory, or more concentrated routing")
        done, learn = 0, Known(counts) if timing.learns else None
        with placer.engine(plan, progress=False, learn=learn) as engine:
            while done < n_tokens:
                made = engine.generate(PROMPT, max_tokens=timing.n_gen, temperature=0.0)
                done += len(PROMPT) + made.n_gen
                begun = time.perf_counter()
                while engine.exchanges:
                    time.sleep(0.001)
                yield {
                    "learns": timing.learns, "tokens": done, "n_gen": made.n_gen, "tpot_s": made.tpot_s,
                    "hot_weights": n_hot, "exchanged": engine.n_exchanged, "exchange_s": time.perf_counter() - begun,
                }  # fmt: skip
