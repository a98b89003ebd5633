#!/usr/bin/env python3
"""How long planning takes, policy by policy, with a profile at hand: processor seconds, as JSON and as a table.

    scripts/plan_times.py [--samples 3] [--json FILE]

No native code, device or file of weights is needed: models are shapes on a described machine, memory is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from make_model import write_shape
from model_shapes import KNOWN

from oallama.core.types import Workload
from oallama.core.units import MIB
from oallama.cost.graph import build_graph
from oallama.device.machines import machine_of
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators
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
    with tempfile.TemporaryDirectory() as folder:
        gguf = read_gguf(write_shape(Path(folder) / "model.gguf", KNOWN[name], "Q4_0", empty=True))
    info, found = model_info(gguf), tuple(operators(gguf))
    n_bytes = sum(operator.bytes for operator in found)
    machine = machine_of(MACHINE)
    profile = with_attention(described(machine.host, machine.card, info, found, BATCHES), "on")
    host = HostLoad(n_bytes, info.n_layer * 16 * MIB, 64 * MIB)
    graph = build_graph(info, found, [tensor.name for tensor in gguf.tensors])
    return Problem(found, graph, profile, probe_of(host, found, info.n_layer, int(SHARE * n_bytes)), None, 0.9, None)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = {
        policy: {name: [seconds(name, policy) for _ in range(options.samples)] for name in MODELS}
        for policy in (*POLICIES, "what-if")
    }
    print(f"| policy | {' | '.join(f'{name}, {KNOWN[name].n_layer} layers' for name in MODELS)} |")
    print(f"|---|{'---|' * len(MODELS)}")
    for policy, by_model in found.items():
        print(f"| `{policy}` | {' | '.join(f'{statistics.median(by_model[name]):.2f}' for name in MODELS)} |")
    if options.json:
        about = {"machine": MACHINE, "vram_share": SHARE, "processor_seconds": found}
        options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
