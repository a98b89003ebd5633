#!/usr/bin/env python3
"""How long planning takes, policy by policy, with a profile at hand: processor seconds, as JSON and as a table.

    scripts/plan_times.py [--samples 3] [--json FILE]

No native code, device or file of weights is needed: models are shapes on a described machine, memory is counted.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from experiments.command import parser_of, write_document
from experiments.pages import table
from experiments.planned import planned
from model_shapes import KNOWN

from oallama.core.types import Workload
from oallama.core.units import MIB
from oallama.device.machines import machine_of
from oallama.place.attention import with_attention
from oallama.place.decide import decide
from oallama.place.problem import Problem
from oallama.place.sliced import QUICK, THOROUGH
from oallama.place.what_if import HostLoad, probe_of
from oallama.profile.described import described

MODELS = ("llama-1b", "llama3-8b", "llama2-70b")
POLICIES = ("cpu", "layers", "atsinfer", "oato", "flexgen", "hetegen", "twinpilots", "split", "scheinfer", "auto")
MACHINE = "pc-24gb"
SHARE = 0.4  # of the weights' bytes, that the card has
BATCHES = (1, 8, 32, 128, 512)
LOAD = Workload(n_prompt=512, n_gen=128, n_ctx=4096)


def problem_of(name: str) -> Problem:
    shaped, machine = planned.__wrapped__(name), machine_of(MACHINE)  # what a graph remembers belongs to what is timed
    profile = with_attention(described(machine.host, machine.card, shaped.info, shaped.operators, BATCHES), "on")
    host = HostLoad(shaped.n_bytes, shaped.info.n_layer * 16 * MIB, 64 * MIB)
    probe = probe_of(host, shaped.operators, shaped.info.n_layer, int(SHARE * shaped.n_bytes))
    return Problem(shaped.operators, shaped.graph, profile, probe, None, 0.9, None)


def seconds(name: str, policy: str) -> float:
    """Of one decision, from a profile that was just read; "what-if" is one card of that command."""
    problem = problem_of(name)
    start = time.process_time()
    if policy == "what-if":
        decide(problem, "auto", LOAD, "mixed", effort=QUICK)
    else:
        decide(problem, policy, LOAD, "mixed", effort=THOROUGH)
    return time.process_time() - start


def main() -> None:
    parser = parser_of("plan_times.py", __doc__)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = {
        policy: {name: [seconds(name, policy) for _ in range(options.samples)] for name in MODELS}
        for policy in (*POLICIES, "what-if")
    }
    columns = ("policy", *(f"{name}, {KNOWN[name].n_layer} layers" for name in MODELS))
    rows = [
        (f"`{policy}`", *(f"{statistics.median(by_model[name]):.2f}" for name in MODELS))
        for policy, by_model in found.items()
    ]
    print("\n".join(table(columns, rows)), end="")
    if options.json:
        about = {"machine": MACHINE, "vram_share": SHARE, "processor_seconds": found}
        write_document(about, options.json)


if __name__ == "__main__":
    main()
