"""A served placement as JSON, and as an html page that polls the JSON: where operators are, predicted and measured
times, memory. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oallama.core.codec import to_json
from oallama.core.history import BlockRuns
from oallama.core.types import ModelInfo, Operator
from oallama.core.units import format_bytes, format_seconds
from oallama.device.spec import device_texts
from oallama.plan.plan import Plan
from oallama.planner.simulate import Simulation
from oallama.report import layout, page
from oallama.report.inspect import model_document
from oallama.report.operators import printable_sentence, range_text
from oallama.report.plan import layer_ranges
from oallama.report.slices import weights_on_device
from oallama.report.table import Table, table
from oallama.report.text import device_name, model_title, percent, policy_on, printable, rate_text

Seconds = Mapping[str, float]
"""By stream: cpu, gpu, in, out."""

HEADINGS = ("on", "layer", "operator", "type", "bytes", "on the card", "copied", "µs/token", "of a token")
SCRIPTS = ("affinity.js", "placement.js")
_NUMERIC = range(4, len(HEADINGS))


@dataclass(frozen=True, slots=True)
class WorkTime:
    """Predicted seconds of an operator, a block or other work, for one token and for the prompt."""

    name: str
    token_s: Seconds
    prompt_s: Seconds


@dataclass(frozen=True, slots=True)
class Served:
    """A served placement. reason: what it is and why, in one line. times: empty without a profile."""

    model: ModelInfo
    operators: tuple[Operator, ...]
    plan: Plan
    reason: str
    times: tuple[WorkTime, ...] = ()

    @property
    def other_work(self) -> list[WorkTime]:
        """Return the times of work that belongs to no operator."""
        names = {operator.name for operator in self.operators}
        return [work for work in self.times if work.name not in names]


def work_times(simulation: Simulation) -> tuple[WorkTime, ...]:
    """Seconds by name, in execution order."""
    times: dict[str, tuple[dict[str, float], dict[str, float]]] = defaultdict(
        lambda: (defaultdict(float), defaultdict(float))
    )
    for timeline, index in ((simulation.token, 0), (simulation.prompt, 1)):
        for activity in sorted(timeline.activities, key=lambda activity: activity.start_s):
            times[activity.name][index][activity.stream] += activity.seconds
    return tuple(WorkTime(name, dict(token), dict(prompt)) for name, (token, prompt) in times.items())


def placement_document(
    served: Served,
    state: Mapping[str, Any],
    live: Mapping[str, Any] | None,
    runs: Sequence[BlockRuns] = (),
    back_end: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The answer to `GET /placement`. state: of the server program; live: its rates, None if unknown; runs: of split
    blocks, shown with their first operators; back_end: the plugin's report, None without one."""
    plan = served.plan
    times = {work.name: {"token_s": work.token_s, "prompt_s": work.prompt_s} for work in served.times}
    return {
        "model": model_document(served.model),
        "served": served.reason,
        "state": dict(state),
        "device": plan.device,
        "policy": plan.policy,
        "plan_fingerprint": plan.fingerprint,
        "plan": plan.to_json(),
        "memory": to_json(plan.memory),
        "predicted": asdict(plan.predicted) if plan.predicted else None,
        "operators": [
            {
                **{key: getattr(operator, key) for key in ("name", "layer", "role", "type", "bytes")},
                "on": placement.backend,
                **({"device": placement.device} if plan.memory.devices and placement.gg else {}),
                **{key: getattr(placement, key) for key in ("gg", "cg", "cc")},
                "predicted": times.get(operator.name),
                "measured": [_mean_run(block) for block in runs if block.block == operator.name] or None,
            }
            for operator, placement in served.plan.pairs(served.operators)
        ],
        "other_work": [asdict(work) for work in served.other_work],
        "live": None if live is None else dict(live),
        "back_end": None if back_end is None else dict(back_end),
    }


def _mean_run(runs: BlockRuns) -> dict[str, int | float]:
    """Wall time of one run with at most `batch` tokens, and its parts."""
    parts = {"cpu_s": runs.cpu_s, "wait_s": runs.wait_s, "other_s": runs.other_s}
    means = {name: total_s / runs.n_runs for name, total_s in parts.items()}
    counts = {"batch": runs.batch, "runs": runs.n_runs, "tokens": runs.n_tokens}
    return {**counts, "seconds": sum(means.values()), **means}


def placement_html(served: Served) -> str:
    """The page; its script fills in live values."""
    plan, n_layer = served.plan, served.model.n_layer
    ranges = layer_ranges(plan, served.operators, n_layer)
    return page.rendered(
        "placement.html.j2",
        SCRIPTS,
        title=model_title(served.model),
        about=("placement", "Placement"),
        subtitles=(
            layout.subtitle(served.model, policy_on(plan.policy, plan.device)),
            printable(served.reason, 1000),
        ),
        notes=[printable_sentence(note) for note in served.plan.notes],
        tiles=_tiles(served),
        map=layout.arranged(_marks(served), ranges),
        devices=[
            (device_name(name), range_text(*span, n_layer))
            for name, span in zip(device_texts(plan.device), ranges, strict=False)
        ],
        timed=bool(served.times),
        bar_width=layout.BAR_WIDTH,
        memories=layout.memories(device_name(plan.device), plan.memory, device_texts(plan.device)),
        weight_segments=layout.weight_segments(*weights_on_device(served.plan.pairs(served.operators))),
        headings=HEADINGS,
        numeric=_NUMERIC,
        places=("all", "GPU", "CPU", "split"),
        operators=_rows(served),
        others=_others(served),
        plan=served.plan.fingerprint,
        fingerprint=f"plan {served.plan.fingerprint[:16]}",
    )


def request_tokens(model: ModelInfo, n_ctx: int) -> int:
    """Tokens that one request may have: llama-server refuses more than the model was trained on."""
    return min(n_ctx, model.n_ctx_train or n_ctx)


def page_policy() -> str:
    """The Content-Security-Policy of placement_html, as a header."""
    return page.content_security_policy(SCRIPTS, "'self'") + "; frame-ancestors 'none'"


def _token_seconds(served: Served) -> dict[str, float]:
    """Predicted seconds of a token by operator; a block of several operators is timed as a whole."""
    names = {operator.name for operator in served.operators}
    return {work.name: sum(work.token_s.values()) for work in served.times if work.name in names}


def _marks(served: Served) -> list[tuple[int | None, str, layout.MapMark]]:
    """Colours: by the time relative to the slowest operator, or by the share on the device without a profile."""
    times = _token_seconds(served)
    longest = max(times.values(), default=0.0)
    marks = []
    for index, (operator, placement) in enumerate(served.plan.pairs(served.operators)):
        place, seconds = placement.backend, times.get(operator.name)
        value = (seconds or 0.0) / (longest or 1.0) if served.times else placement.gg
        took = f", {format_seconds(seconds)} a token" if seconds else ""
        shares = "" if place != "split" else f", {placement.gg:.0%} on the card, {placement.cg:.0%} copied when needed"
        if placement.hot_experts:
            shares = f", {len(placement.hot_experts)} of {operator.shape[2]} experts on the card"
        label = f"{printable(operator.name)}: {_WHERE[place]}{shares}{took}"
        marks.append(
            (operator.layer, operator.role, layout.MapMark(f"op-{index}", place[0].upper(), layout.step(value), label))
        )
    return marks


_WHERE = {"GPU": "on the card", "CPU": "on the CPU", "split": "divided between card and CPU"}


def _rows(served: Served) -> list[layout.OperatorRow]:
    times = _token_seconds(served)
    token_s = served.plan.predicted.tpot_s if served.plan.predicted else 0.0
    rows = []
    for index, (operator, placement) in enumerate(served.plan.pairs(served.operators)):
        place, seconds = placement.backend, times.get(operator.name)
        layer = "-" if operator.layer is None else str(operator.layer)
        cells = (
            place,
            layer,
            printable(operator.name),
            printable(operator.type),
            format_bytes(operator.bytes),
            f"{placement.gg:.0%}",
            f"{placement.cg:.0%}",
            "-" if seconds is None else f"{seconds * 1e6:,.1f}",
            "-" if seconds is None else percent(seconds, token_s),
        )
        last = -1.0 if seconds is None else seconds
        order = -1 if operator.layer is None else operator.layer
        keys = (*(place, order, cells[2], cells[3], operator.bytes, placement.gg, placement.cg), last, last)
        rows.append(layout.OperatorRow(f"op-{index}", place, 0, cells, tuple(map(str, keys))))
    return rows


def _others(served: Served) -> Table:
    """Return a table of the work beside operators, by stream."""
    rows = [
        (printable(work.name), stream, format_seconds(seconds))
        for work in served.other_work
        for stream, seconds in work.token_s.items()
    ]
    return table("What else a token takes, predicted", "what |stream |>per token", rows)


def _tiles(served: Served) -> list[tuple[str, str, str, str]]:
    """(what, value, remark, key by which the script fills it in; empty for what does not change)."""
    predicted = served.plan.predicted
    on_device, total = weights_on_device(served.plan.pairs(served.operators))
    rate = rate_text(predicted.tpot_s) if predicted else "-"
    workload = served.plan.workload
    most = request_tokens(served.model, workload.n_ctx)
    prompt = rate_text(predicted.ttft_s / workload.n_prompt) if predicted and workload.n_prompt else "-"
    return [
        ("Server", "…", "", "state"),
        ("Generation", "…", f"measured; predicted {rate}", "generation"),
        ("Prompt", "…", f"measured; predicted {prompt}", "prompt"),
        ("Requests now", "…", "answered, waiting", "requests"),
        ("Weights on the device", percent(on_device, total), f"{format_bytes(on_device)} of {format_bytes(total)}", ""),
        ("Context", f"{workload.n_ctx:,}", f"tokens of all requests together; of one at most {most:,}", ""),
    ]
