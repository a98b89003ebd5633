"""docs/gpu.md from the results in docs/benchmarks/gpu-*.json. No number is in it that is not in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.comparison import compare_with_stock
from experiments.pages import table
from reproduce.figures import least_and_most, published

from gpu_steps import copy_tables, tables
from gpu_steps.scale import LEASE
from gpu_steps.steps import steps_of

Document = Mapping[str, Any]

NOT_YET = "not yet measured on a GPU"
LEASE_S = 3 * 570.0
"""Three calls, in which the models are written as well."""
SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader")
OATO_TTFT_75 = "about 2"
"""Section 4.3, the same model at 75 %: times as fast as llama.cpp ("close to one time")."""
POLICIES = ("auto", "oato", "split", "scheinfer", "layers", "cpu")


def is_gpu(document: Document) -> bool:
    """Whether a graphics card was measured: no worker process, no second CPU, no Vulkan on the processor."""
    name = document["device"].split(":")[0]
    if name.lower().startswith("rpc") or name in ("cpu-pair", "none"):
        return False
    found = document["steps"].get("doctor", {}).get("data") or {}
    here = next((device for device in found.get("devices", []) if device["name"] == name), None)
    return here is not None and not any(word in here["description"].lower() for word in SOFTWARE)


def page(template: str, documents: Mapping[str, Document], build: Document | None, source_bytes: int | None) -> str:
    """The page. documents: by file name. build: the manifest of a pack, with what was measured of its making."""
    measured = {name: document for name, document in documents.items() if is_gpu(document)}
    rehearsed = {name: document for name, document in documents.items() if name not in measured}
    parts = {
        "state": state(measured, rehearsed),
        "build": build_table(build),
        "source_size": f"{source_bytes / 2**20:.1f} MiB" if source_bytes else "some MiB",
        "steps": "\n".join(steps_table()),
        "papers": "\n".join(papers_table(measured)),
        "results": "\n".join(
            [
                *(line for name, document in measured.items() for line in chapter("Measured", name, document)),
                *(line for name, document in rehearsed.items() for line in chapter("Rehearsed", name, document)),
            ]
        ),
    }
    for name, text in parts.items():
        template = template.replace("{{" + name + "}}", text.strip())
    return template.rstrip() + "\n"


def state(measured: Mapping[str, Document], rehearsed: Mapping[str, Document]) -> str:
    names = ", ".join(f"`{document['device']}`" for document in rehearsed.values())
    if measured:
        cards = "; ".join(tables.machine_line(document) for document in measured.values())
        return f"**Measured on:** {cards}." + (f" Rehearsed on {names}." if names else "")
    intro = f"**This is {NOT_YET}.** "
    if not rehearsed:
        return intro + "Nor was it rehearsed."
    return intro + (
        f"What stands below was rehearsed with the same scripts on {names}: a worker process, the processor itself "
        "through Mesa's lavapipe, or a card whose timing is emulated. Those figures show that the steps run and what "
        "they report; they say nothing of a GPU's speed."
    )


def build_table(build: Document | None) -> str:
    if build is None:
        return "Its size and time have not been recorded."
    mib = {name: size / 2**20 for name, size in build["unpacked_bytes"].items()}
    parts = ", ".join(f"{name} {size:.1f}" for name, size in mib.items())
    seconds = build["compiler_seconds"]
    rows = [
        ("pack, compressed", f"{build['archive_bytes'] / 2**20:.1f} MiB"),
        ("unpacked", f"{sum(mib.values()):.1f} MiB ({parts})"),
        ("architectures", ", ".join(f"sm_{name}" for name in build["architectures"])),
        ("nvcc, flash attention, programs", f"{build['nvcc']}, {'yes' if build['flash_attention'] else 'no'}, "
         f"{', '.join(build['programs']) or 'none'}"),
        ("compilers' time, all together", f"{sum(seconds.values()) / 60:.0f} min ({_minutes(seconds)})"),
    ]  # fmt: skip
    note = build.get("note", "")
    return "\n".join(table(("", "measured"), rows)) + (f"\n{note}\n" if note else "")


def _minutes(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {each / 60:.1f}" for name, each in seconds.items())


def steps_table() -> list[str]:
    steps = steps_of(LEASE, "CUDA0", 16, POLICIES)
    rows = [(step.id, step.title, f"{step.seconds:.0f}") for step in steps]
    total = sum(step.seconds for step in steps)
    first, passed = "", 0.0
    for step in steps:
        passed += step.seconds
        first = step.id if passed <= LEASE_S else first
    return [*table(("step", "what", "about s"), rows), f"About {total / 60:.0f} minutes, and writing the models. The "
            f"{LEASE_S / 60:.0f} minutes that a machine is rented for get to `{first}`, if the estimates hold; the "
            "rest is for another, with `--resume`."]  # fmt: skip


def papers_table(measured: Mapping[str, Document]) -> list[str]:
    """The published figures, and for each what was found on each GPU."""
    figures, caps = published(), ("12 GiB", "24 GiB")
    abstract, threads = figures["scheinfer/generation-most-abstract"], (16, 8, 4, 2)
    rows: list[Sequence[object]] = [
        *(("OATO §4.5: LLaMA3-8B F16, 64 + 32 tokens, whole run, against llama.cpp", share, tables.oato_gain(share),
           found(measured, "oato", share, "total")) for share in ("25%", "50%", "75%")),
        ("OATO §4.2: the same, another figure", "50%", tables.per_cent(figures["oato/fig7-llama-llama.cpp"]),
         found(measured, "oato", "50%", "total")),
        ("OATO §4.3: the same, TTFT", "75%", f"{OATO_TTFT_75} times", found(measured, "oato", "75%", "ttft")),
        *(("ScheInfer §V-C: prompt of 1024, against llama.cpp and Fiddler", cap, f"{least_and_most('prompt')} times",
           found(measured, "scheinfer", cap, "ttft")) for cap in caps),
        *(("ScheInfer §V-D: generation, against llama.cpp and Fiddler", cap,
           f"{least_and_most('generation')} times (abstract: {abstract:.2f})",
           found(measured, "scheinfer", cap, "tpot")) for cap in caps),
        *(("ScheInfer §V-D: both together", cap, f"{least_and_most('both')} times",
           found(measured, "scheinfer", cap, "total")) for cap in caps),
        ("ScheInfer §V-E1: generation with 16, 8, 4, 2 threads, against llama.cpp", "",
         ", ".join(f"{figures[f'scheinfer/threads-{n}-llama.cpp']}" for n in threads) + " times", "-"),
    ]  # fmt: skip
    columns = ("figure", "on the GPU", "the paper", "ours, best arm of each model, against the best stock arm")
    return [*table(columns, rows), "The papers' cards are smaller and their links slower than a data centre's: "
            "see the bound below a cell (older ones have none)."]  # fmt: skip


def found(measured: Mapping[str, Document], paper: str, cap: str, metric: str) -> str:
    """Our best arm's ratio in each cell of that paper and cap; NOT_YET where there is none."""
    lines = []
    for document in measured.values():
        for _, step in tables.of_kind(document, "ab"):
            data = step["data"]
            if (data["paper"], data["cap"]) != (paper, cap):
                continue
            place = (document["device"], data["model"], cap, "")
            rows = [a for a in compare_with_stock(place, data["rows"], metric) if a.value is not None]
            if rows:
                best = max(rows, key=lambda a: a.value or 0.0)
                lines.append(f"{data['model']}: {best.value:.2f} ({best.low:.2f}..{best.high:.2f}, {best.arm})")
    return "; ".join(lines) or NOT_YET


def chapter(kind: str, name: str, document: Document) -> list[str]:
    """Everything that one results file tells."""
    sections = (
        ("Is it right?", tables.correctness_table(document)),
        ("Small copies beside streamed weights", copies(name, document)),
        ("Profile (GB/s)", tables.profile_table(document)),
        ("Copies, pinned memory, slices (GFLOP/s)", tables.device_tables(document)),
        ("Against stock llama.cpp", tables.ab_tables(document, is_gpu(document))),
        ("Where a token goes", tables.timeline_tables(document)),
        ("Switches", tables.switches_table(document)),
        ("Steps", tables.steps_table(document)),
    )
    lines = [
        f"## {kind}: {document['device']}",
        "",
        f"{tables.machine_line(document)}. Raw: [{name}](benchmarks/{name}).",
        "",
    ]
    if note := document.get("note"):
        lines += [note, ""]
    for heading, body in sections:
        if body:
            lines += [f"### {heading} ({document['device']})", "", *body]
    return lines


def copies(name: str, document: Document) -> list[str]:
    """The copy queue's table and picture; [] where it was not measured."""
    lines = copy_tables.copies_table(document)
    rows = [row for _, step in tables.of_kind(document, "copies") for row in step["data"]]
    late = [row["late"] for row in rows if row.get("late") is not None]
    if late:
        lines += [f"The emulated device was late for {max(late):.2%} of the time at most.", ""]
    picture = f"![latency of small copies](pictures/{name.removesuffix('.json')}-copies.svg)"
    return [*lines, picture, ""] if lines else []


def write_report(root: Path) -> int:
    """Write docs/gpu.md and its pictures. Returns the exit status."""
    (root / "docs" / "gpu.md").write_text(current(root), encoding="utf-8")
    from gpu_steps.plots import write_plots

    if not write_plots(read_documents(root), root / "docs" / "pictures"):
        print("gpu_run: no pictures: matplotlib is missing, or nothing was compared", file=sys.stderr)
    print("docs/gpu.md")
    return 0


def current(root: Path) -> str:
    """The page as it should be now."""
    template = (root / "scripts" / "gpu_steps" / "page.md").read_text(encoding="utf-8")
    build = _read(root / "docs" / "benchmarks" / "cuda-build.json")
    source_bytes = build.get("source_archive_bytes") if build else None
    return page(template, read_documents(root), build, source_bytes)


def read_documents(root: Path) -> dict[str, Document]:
    files = sorted((root / "docs" / "benchmarks").glob("gpu-*.json"))
    return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}


def _read(path: Path) -> Document | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
