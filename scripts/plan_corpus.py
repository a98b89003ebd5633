#!/usr/bin/env python3
"""Plan a corpus of models on recorded profiles, and compare the plans with recorded ones: did a change alter a plan?

    scripts/plan_corpus.py add-profile NAME FILE...   # keep profiles (`oallama profile --json`) without their samples
    scripts/plan_corpus.py record                     # plan everything and keep it
    scripts/plan_corpus.py compare [--only TEXT]      # plan again; what differs, and what is predicted now and before
    scripts/plan_corpus.py without TERM [--only TEXT] # what plans made without a term of the cost model lose

No native code, device or file of weights is needed: models are shapes, memory is counted (place/what_if.py).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared import Planned, parser_of, planned, write_document

from oallama.core.errors import OallamaError
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE, Workload
from oallama.core.units import GIB, MIB
from oallama.cost.offload import cache_bytes
from oallama.device.cards import preset
from oallama.place.attention import with_attention
from oallama.place.decide import decide
from oallama.place.problem import Decision, Problem, costs_of, with_layouts
from oallama.place.simulate import simulate
from oallama.place.what_if import HostLoad, probe_of
from oallama.profile.described import with_card
from oallama.profile.store import profile_from_json, profile_to_json, read_profile

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "corpus"
PLANS = FOLDER / "plans.json"

MODELS = {"llama-1b": None, "llama3-8b": None, "mixtral-8x7b": 4, "moe-2.7b": None}
"""Known shapes, with so many layers, as Q4_0."""

CARDS = ("rtx3090", "rtx5090")
"""Described beside the CPU of the first profile that has it measured for the model."""

POLICIES = ("oato", "scheinfer", "split", "layers", "cpu")
CAPS = ({"gpu_weights": 0.5}, {"vram_share": 0.45})
"""Share of the operators' bytes on the device; memory of the device as a share of the model's."""

LOAD = Workload(n_prompt=512, n_gen=128, n_ctx=4096)
COMPUTE_BYTES = 256 * MIB  # of a context's buffers, taken as the same everywhere


def model(name: str) -> Planned:
    return planned(name, n_layer=MODELS[name])


def profiles() -> Iterator[tuple[str, str, Profile]]:
    """(profile's name, model's name, profile) of all that can be planned."""
    recorded = {path.stem: read_profile(path) for path in sorted(FOLDER.glob("profile-*.json"))}
    for name in MODELS:
        wanted = {operator.mul_mat for operator in model(name).operators}
        serving = {
            stem: profile
            for stem, profile in recorded.items()
            if wanted <= {c.mul_mat for c in profile.cases if c.device != CPU_DEVICE}
        }
        for stem, profile in serving.items():
            yield stem.removeprefix("profile-"), name, _of_model(profile, name)
        for card in CARDS if serving else ():
            host = _of_model(next(iter(serving.values())), name)
            yield card, name, with_card(host, preset(card), model(name).info, model(name).operators)


def _of_model(profile: Profile, name: str) -> Profile:
    """Without what was measured for other models in the same store."""
    info = model(name).info
    wanted = {operator.mul_mat for operator in model(name).operators}
    heads = (info.n_embd, info.n_head, info.n_head_kv)
    return replace(
        profile,
        cases=tuple(c for c in profile.cases if c.mul_mat in wanted),
        rest=tuple(r for r in profile.rest if r.shape and (r.shape.n_embd, r.shape.n_head, r.shape.n_head_kv) == heads),
    )


def problem(name: str, profile: Profile, cap: dict[str, float]) -> Problem:
    """With flash attention everywhere."""
    shaped = model(name)
    flash = with_attention(profile, "on")
    shape = next(rest.shape for rest in flash.rest if rest.shape is not None)
    kv = int(LOAD.n_ctx * shaped.info.n_layer * cache_bytes(shape))
    vram = int(cap.get("vram_share", 0) * shaped.n_bytes) + (kv + COMPUTE_BYTES if "vram_share" in cap else 24 * GIB)
    probe = probe_of(HostLoad(shaped.n_bytes, kv, COMPUTE_BYTES), shaped.operators, shaped.info.n_layer, vram)
    return Problem(shaped.operators, shaped.graph, flash, probe, vram, 0.9, cap.get("gpu_weights"),
                   slices_only=profile.device == "cpu-pair", host_room=8 * GIB)  # fmt: skip


def record_of(decision: Decision) -> dict[str, Any]:
    """What is kept of a decision."""
    placed = decision.placed
    slices = placed.slices
    gg, cg, layouts = (slices.gg, slices.cg, slices.layouts) if slices else ((), (), ())
    cuts = json.dumps([placed.on_device, placed.first_device_layer, gg, cg, layouts])
    return {
        "digest": hashlib.sha256(cuts.encode()).hexdigest()[:12],
        "ttft_s": decision.predicted.ttft_s,
        "tpot_s": decision.predicted.tpot_s,
        "total_s": decision.predicted.total_s,
        "first_device_layer": placed.first_device_layer,
        "whole": sum(placed.on_device),
        "sliced": sum(map(bool, gg)),
        "streamed": sum(map(bool, cg)),
        "n_g": [list(pair) for pair in slices.token_assignment] if slices else [],
        "weights_gpu": decision.memory.weights_gpu,
        "staging": decision.memory.staging,
    }


@dataclass(frozen=True)
class CorpusCell:
    """What is planned: a model on a profile under a cap, by a policy."""

    model: str
    profile: Profile
    cap: dict[str, float]
    policy: str

    def decision(self, changed: Profile | None = None) -> Decision:
        return decide(problem(self.model, changed or self.profile, self.cap), self.policy, LOAD, "mixed")


def cells(only: str) -> Iterator[tuple[str, CorpusCell]]:
    for profile_name, name, profile in profiles():
        for cap in CAPS:
            for policy in POLICIES:
                key = "/".join((profile_name, name, " ".join(f"{k}={v}" for k, v in cap.items()), policy))
                if only in key:
                    yield key, CorpusCell(name, profile, cap, policy)


def all_plans(only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, cell in cells(only):
        start = time.perf_counter()
        try:
            made = record_of(cell.decision())
        except OallamaError as error:
            made = {"error": type(error).__name__}
        print(f"{key}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        yield key, made


def compare(only: str) -> int:
    """Exit status 1 where a plan differs. A plan that is predicted the same within rounding is the same."""
    before = json.loads(PLANS.read_text(encoding="utf-8"))
    n_same = n_differ = 0
    for key, now in all_plans(only):
        then = before.get(key)
        if then is None:
            print(f"new      {key}")
        elif _same(then, now):
            n_same += 1
        else:
            n_differ += 1
            kind = "plan" if then.get("digest") != now.get("digest") else "price"
            times = (f"{name[:-2]} {then[name]:.6g} -> {now[name]:.6g}" for name in ("ttft_s", "tpot_s", "total_s")
                     if name in then and name in now)  # fmt: skip
            print(f"{kind:9}{key}: {', '.join(times) or f'{then} -> {now}'}")
    print(f"{n_same} the same, {n_differ} differ")
    return int(n_differ > 0)


def _same(then: dict[str, Any], now: dict[str, Any]) -> bool:
    return then.keys() == now.keys() and all(
        abs(value - now[key]) <= 1e-9 * abs(value) if isinstance(value, float) else value == now[key]
        for key, value in then.items()
    )


#
# terms of the cost model
#


def _copies_s(profile: Profile) -> float:
    """Of an excursion's latency."""
    return sum(profile.link[way].alpha_s for way in ("h2d_pinned", "d2h_pinned") if way in profile.link)


def _with_boundary(profile: Profile, alpha_s: float) -> Profile:
    boundary = profile.boundary
    return profile if boundary is None else replace(profile, boundary=replace(boundary, alpha_s=max(0.0, alpha_s)))


def _without_launches(profile: Profile) -> Profile:
    return replace(_with_boundary(profile, _copies_s(profile)), launch_s=0.0, launch_issue_s=None)


def _without_latency(profile: Profile) -> Profile:
    excursion_s = profile.boundary.alpha_s if profile.boundary else 0.0
    link = {way: replace(line, alpha_s=0.0) for way, line in profile.link.items()}
    return replace(_with_boundary(profile, excursion_s - _copies_s(profile)), link=link)


TERMS: dict[str, Callable[[Profile], Profile]] = {
    "launches": _without_launches,
    "latency": _without_latency,  # of copies
    "crossings": lambda profile: _without_launches(_without_latency(profile)),  # but for their bytes
    "launch-issue": lambda profile: replace(profile, launch_issue_s=None),
    "sharing": lambda profile: replace(profile, sharing=()),
    "copy-wait": lambda profile: replace(profile, copy_wait=None),
}
"""Name -> the profile without that term."""


def without(term: str, only: str) -> int:
    for key, cell in cells(only):
        made, other = cell.decision(), cell.decision(TERMS[term](cell.profile))
        if record_of(made)["digest"] == record_of(other)["digest"]:
            print(f"{key}: the same plan", flush=True)
            continue
        full = problem(cell.model, cell.profile, cell.cap)
        placed = with_layouts(full, costs_of(full, other.workload, "mixed"), other.placed)
        taken = simulate(full, other.workload, placed).predicted.total_s
        print(f"{key}: another plan, which loses {taken / made.predicted.total_s - 1:.2%}", flush=True)
    return 0


def add_profile(name: str, file: Path) -> None:
    profile = read_profile(file)
    slim = replace(
        profile,
        cases=tuple(replace(case, samples=(case.seconds,)) for case in profile.cases),
        rest=tuple(replace(case, samples=(case.seconds,)) for case in profile.rest),
        skipped=(),
    )
    document = profile_to_json(slim)
    lines = {key: json.dumps(value) for key, value in document.items() if key not in ("cases", "rest")}
    for key in ("cases", "rest"):
        lines[key] = "[\n" + ",\n".join(map(json.dumps, document[key])) + "\n]"
    text = "{\n" + ",\n".join(f'"{key}": {value}' for key, value in lines.items()) + "\n}\n"
    profile_from_json(json.loads(text))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"profile-{name}.json").write_text(text, encoding="utf-8")


def main() -> int:
    parser = parser_of("plan_corpus.py", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add-profile")
    add.add_argument("name")
    add.add_argument("file", type=Path)
    commands.add_parser("record")
    commands.add_parser("compare").add_argument("--only", default="", metavar="TEXT")
    term = commands.add_parser("without")
    term.add_argument("term", choices=TERMS)
    term.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    if options.command == "add-profile":
        add_profile(options.name, options.file)
        return 0
    if options.command == "record":
        write_document(dict(all_plans()), PLANS)
        return 0
    return compare(options.only) if options.command == "compare" else without(options.term, options.only)


if __name__ == "__main__":
    sys.exit(main())
