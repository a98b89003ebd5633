"""The pictures of docs/ out of results: predicted against measured, streams, ScheInfer's ablations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from experiments import pictures
from experiments.pictures import CPU, DEVICE, GREY, JOIN, LIGHT, LINK, lanes, panels

from measure import soak_plots
from measure.placements import error
from measure.slices import cuts_of, median_error
from oallama.core.errors import UsageError

Span = tuple[str, float, float]
STREAMED = "#7fbf9f"
LANES = ("link", "device", "CPU", "joins")
MEASURED = {
    "copy": ("link", LINK), "send": ("device", LIGHT), "resident": ("device", DEVICE), "streamed": ("device", STREAMED),
    "fetch": ("device", LIGHT), "launch": ("CPU", LIGHT), "ahead": ("CPU", LIGHT), "host": ("CPU", CPU),
    "join": ("joins", JOIN),
}  # fmt: skip
"""Step of a trace -> (lane, colour)."""

PREDICTED = {"copy": ("link", LINK), "gpu": ("device", DEVICE), "cpu": ("CPU", CPU), "join": ("joins", JOIN)}
NAMES = {LINK: "copy of CG and CG'", DEVICE: "GG", STREAMED: "CG and CG'", CPU: "CC", LIGHT: "launch, send, fetch",
         JOIN: "join"}  # fmt: skip
N_BLOCKS = 4
THREADS = {"2": "#c0392b", "4": "#d98c1f", "8": "#2a8f5b", "16": "#0b4f8a"}


def draw(what: str, file: Path, folder: Path) -> int:
    """Draw the pictures of a results file. Returns the exit status; raises UsageError without matplotlib."""
    if not pictures.is_there():
        raise UsageError(pictures.MISSING)
    document = json.loads(file.read_text(encoding="utf-8"))
    for name, figure in PICTURES[what].items():
        pictures.write(figure(document), folder / name)
        print(folder / name, file=sys.stderr)
    return 0


def steps_data(document: Mapping[str, Any]) -> list[Any]:
    """What was found in each step."""
    return [step["data"] for step in document["steps"].values() if step.get("data")]


def _placements(document: Mapping[str, Any]) -> Any:
    rows = steps_data(document)
    figure, axes = panels(1, 2, (8.4, 3.9), layout="constrained")
    for axis, key, title in zip(axes[0], ("ttft_s", "tpot_s"), ("time to first token", "time per token"), strict=True):
        pairs = [(1e3 * row[key]["measured"], 1e3 * row[key]["predicted"]) for row in rows]
        pictures.diagonal(axis, [value for pair in pairs for value in pair], log=False)
        axis.plot([measured for measured, _ in pairs], [predicted for _, predicted in pairs], "o", color=CPU)
        axis.set(xlabel="measured, ms", ylabel="predicted, ms")
        off = median(abs(error(row, key)) for row in rows)
        axis.set_title(f"{title}: median error {off:.1%}", fontsize=11)
        axis.legend(loc="upper left", frameon=False)
    return figure


STREAMED_OF_CUT = {"nothing streamed": LIGHT, "CG streamed": LINK, "CG' too": CPU}


def _streamed(cut: Mapping[str, Any]) -> str:
    return "CG' too" if cut["n_g"] > 0 else "CG streamed" if cut["r_cg"] > 0 else "nothing streamed"


def _slices(document: Mapping[str, Any]) -> Any:
    cuts = cuts_of(steps_data(document))
    figure, axes = panels(1, 2, (9.2, 4.2), layout="constrained")
    for axis, phase in zip(axes[0], ("prompt", "decode"), strict=True):
        times = [1e3 * cut[phase][key] for cut in cuts for key in ("measured_s", "predicted_s")]
        pictures.diagonal(axis, times, log=False)
        for label, colour in STREAMED_OF_CUT.items():
            rows = [cut[phase] for cut in cuts if _streamed(cut) == label]
            axis.plot([1e3 * r["predicted_s"] for r in rows], [1e3 * r["measured_s"] for r in rows], "o", ms=5,
                      color=colour, label=label)  # fmt: skip
        axis.set(xlabel="predicted $t_{fin}$, ms", ylabel="measured $t_{fin}$, ms")
        axis.set_title(f"{phase}: median error {median_error(cuts, phase):.0%}", fontsize=10)
        axis.legend(frameon=False, fontsize=8)
    return figure


def _streams(document: Mapping[str, Any]) -> Any:
    """Four blocks out of the middle of a pass, as measured and as predicted, on one scale of time."""
    (data,) = steps_data(document)
    figure, axes = panels(4, 1, (9.6, 9.0))
    for row, (phase, title) in enumerate((("prompt", "a prompt"), ("decode", "one token"))):
        found = data[phase]
        measured, predicted = _measured_blocks(found["measured"]), _predicted_blocks(found["predicted"])
        longest = max(end for _, _, end in [*measured, *predicted])
        for axis, spans, look, what, seconds in (
            (axes[2 * row, 0], measured, MEASURED, "measured", found["seconds"]),
            (axes[2 * row + 1, 0], predicted, PREDICTED, "predicted", found["predicted_seconds"]),
        ):
            lanes(axis, LANES, spans, look)
            axis.set_xlim(0, 1.01e3 * longest)
            busy = f", link busy {found['link_busy']:.0%}" if what == "measured" else ""
            axis.set_title(f"{title}, {what}: the whole pass {1e3 * seconds:.1f} ms{busy}", fontsize=10)
    axes[-1, 0].set_xlabel("ms")
    pictures.key(figure, NAMES)
    settings = document["settings"]
    figure.suptitle(
        f"{settings['files']}, $r_{{GG}}$ = {data['r_gg']:.2f}, $r_{{CG}}$ = {data['r_cg']:.2f}, "
        f"$n_g$ = {data['n_g']}, {settings['device'].split('://')[0]}: four blocks", fontsize=11,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def _measured_blocks(spans: list[list[Any]]) -> list[Span]:
    """From the launch of the first of the blocks drawn."""
    launches = sorted(begin for step, name, begin, _, _ in spans if step == "launch" and "ffn" in name)
    return _between([(s[0], s[2], s[3]) for s in spans], launches)


def _predicted_blocks(spans: list[list[Any]]) -> list[Span]:
    begins: dict[int, float] = {}
    for stream, block, begin, _ in spans:
        if stream != "copy":
            begins[block] = min(begin, begins.get(block, begin))
    return _between([(s[0], s[2], s[3]) for s in spans], [begins[block] for block in sorted(begins)])


def _between(spans: list[Span], begins: list[float]) -> list[Span]:
    """The spans of N_BLOCKS blocks after the first third, in seconds from the first one's beginning."""
    first = min(len(begins) // 3, max(0, len(begins) - N_BLOCKS - 1))
    begin, end = begins[first], begins[min(first + N_BLOCKS, len(begins) - 1)]
    return [(step, max(a, begin) - begin, min(b, end) - begin) for step, a, b in spans if b > begin and a < end]


def _ablations(document: Mapping[str, Any]) -> Any:
    figure, axes = panels(2, 2, (9.6, 7.2), layout="constrained")
    _sweep(axes[0, 0], document)
    means = document["fixed_means"]
    rates = [f"fixed {float(rate):g}" for rate in document["fixed"][0]["speed_up"]]
    _bars(axes[0, 1], "V-E2: solved $r_{CG}$ over a fixed one", rates, means["published"], means["by_fixed_rate"])
    axes[0, 1].set_ylim(0, 2.8)
    for axis, title, what, key, unit in (
        (axes[1, 0], "V-E3: $r_{GG}$ assigned over whole layers", "memory", "memory_gb", " GB"),
        (axes[1, 1], "V-E4: tokens assigned over none", "tokens", "n_tokens", ""),
    ):
        rows = document[what]["16_threads"]
        groups = [f"{row['model'].split('-')[0]}\n{row[key]}{unit}" for row in rows]
        _bars(axis, title, groups, [row["published"] for row in rows], [row["predicted"] for row in rows])
    axes[1, 0].set_ylim(0, 1.8)
    axes[1, 1].set(yscale="log", ylim=(0.8, 120), xlabel="tokens of the prompt")
    return figure


def _sweep(axis: Any, document: Mapping[str, Any]) -> None:
    for row in document["rates"]:
        threads = str(row["threads"])
        colour, points = THREADS[threads], document["sweep"][threads]
        axis.plot([r for r, _ in points], [1e3 * s for _, s in points], color=colour, label=f"{threads} threads")
        axis.plot(row["solved_r_cg"], 1e3 * row["ffn_s"], "o", color=colour)
        axis.axvline(row["published_r_cg"], color=colour, linestyle=":", linewidth=1)
    axis.set(xlabel="$r_{CG}$", ylabel="FFN, ms", xlim=(0, 1), ylim=(0, 14))
    axis.set_title("LLaMA-2-70B, $r_{GG}$ = 0: solved (dots), published (dotted)", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def _bars(axis: Any, title: str, groups: list[str], published: list[float], predicted: list[float]) -> None:
    for shift, colour, label, values in ((-0.2, LIGHT, "published", published), (0.2, CPU, "predicted", predicted)):
        bars = axis.bar([x + shift for x in range(len(groups))], values, 0.4, color=colour, label=label)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    axis.axhline(1, color=GREY, linewidth=0.8)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylabel("speed-up")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


PAPER_LANES = ("GPU: attention", "copy of CG", "GPU: CG", "CPU: CC")
PAPER_STREAMS = {"attention": (PAPER_LANES[0], LIGHT), "copy": (PAPER_LANES[1], LINK), "gpu": (PAPER_LANES[2], DEVICE),
                 "cpu": (PAPER_LANES[3], CPU)}  # fmt: skip


def _paper_streams(document: Mapping[str, Any]) -> Any:
    runs = document["streams"]
    figure, axes = panels(2, 1, (9.6, 4.6), sharex=True, layout="constrained")
    longest = max(run["seconds"] for run in runs.values())
    titles = {"layer": "copies start with their layer (paper)", "continuous": "copies run ahead, ring of two slots"}
    for axis, (name, run) in zip(axes.flat, runs.items(), strict=True):
        begins = [0.0, *run["layer_ends_s"][:-1]]
        spans: list[Span] = [("attention", begin, begin + run["attention_s"]) for begin in begins]
        spans += [(s["stream"], max(0.0, s["start_s"]), min(s["end_s"], run["seconds"])) for s in run["spans"]]
        shades = [1.0] * len(begins) + [0.65 if s["layer"] % 2 else 1.0 for s in run["spans"]]
        lanes(axis, PAPER_LANES, spans, PAPER_STREAMS, shades)
        for end in run["layer_ends_s"]:
            axis.axvline(1e3 * end, color=GREY, linewidth=0.8, linestyle=":")
        axis.set_xlim(0, 1.01e3 * longest)
        axis.set_title(
            f"{titles[name]}: $r_{{CG}}$ = {run['r_cg']:.3f}, three layers in {1e3 * run['seconds']:.2f} ms, "
            f"link busy {run['link_busy']:.0%}",
            fontsize=10,
        )
    axes[-1, 0].set_xlabel("ms")
    return figure


PICTURES: Mapping[str, Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "placements": {"predicted.svg": _placements},
    "slices": {"slices-random.svg": _slices},
    "streams": {"slices-streams.svg": _streams},
    "soak-loads": {"soak-loads.svg": soak_plots.loads},
    "soak-tokens": {"soak-tokens.svg": soak_plots.tokens},
    "scheinfer": {"scheinfer.svg": _ablations, "scheinfer-streams.svg": _paper_streams},
}
