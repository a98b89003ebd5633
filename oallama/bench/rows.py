"""A comparison as rows in llama-bench's format (one per arm and test, with further fields of ours), and as text. Pure.

Field names and types are those of llama-bench at llama.cpp 0c1e570, so that its compare-llama-bench.py accepts these
rows. Our fields follow them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean, stdev
from typing import Any

from oallama.bench.records import ArmResult, BenchResult, BenchTest, Sample, Series
from oallama.bench.stats import LEAST_PAIRS, speed_ratio
from oallama.core.codec import jsonable
from oallama.core.types import Ratio
from oallama.core.units import GIB, MIB
from oallama.report.table import in_lines
from oallama.run.stock import StockPlacement, bytes_at

Row = dict[str, Any]
Value = Callable[[Sample], float]  # of a sample, seconds; 0: the test has none


def rows(result: BenchResult) -> list[Row]:
    """Make a row per test and arm with samples, in the order of tests, then arms."""
    return [_row(result, series, index) for series in result.series if series.kept for index in range(len(result.arms))]


def not_comparable(arms: Sequence[ArmResult], index: int) -> str | None:
    """Why the arm cannot be compared with the first, in a sentence; None if it can."""
    arm, first = arms[index], arms[0]
    for compared in (arm, first):
        if compared.problems:
            return f"{compared.spec.name} did not run as specified: {compared.problems[0]}"
    if index and (arm.same_as or arm.spec.name) == (first.same_as or first.spec.name):
        return f"{arm.spec.name} is the same configuration as {first.spec.name}"
    return None


def refusal(arms: Sequence[ArmResult], index: int, n_pairs: int) -> str | None:
    """Why the arm has no ratio to the first arm, in a sentence; None if it has a ratio."""
    if (why := not_comparable(arms, index)) is None and n_pairs < LEAST_PAIRS:
        return f"{n_pairs} samples of each arm are too few for an interval; use -r {LEAST_PAIRS} or more"
    return why


def ratio_of(series: Series, index: int, value: Value) -> Ratio | None:
    """Speed of an arm relative to the first; None with too few samples, or if the test has no such part."""
    first, other = ([value(sample) for sample in series.samples(arm)] for arm in (0, index))
    if not all(seconds > 0 for seconds in (*first, *other)):
        return None
    return speed_ratio(first, other)


def _row(result: BenchResult, series: Series, index: int) -> Row:
    arm, test = result.arms[index], series.test
    samples = series.samples(index)
    return _setting_fields(arm) | {
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": result.started,
        **_speed_fields(result, series, index),
        "arm": arm.spec.name,
        "device_bytes": arm.report.device_bytes,
        "host_bytes": arm.report.host_bytes,
        "operator_bytes_on_device": bytes_at(result.operators, arm.report.shares),
        "cap_device_bytes": arm.spec.setting.cap.device_bytes,
        "cap_operator_bytes": arm.spec.setting.cap.operator_bytes,
        "flash_attn_used": int(arm.report.flash_attn),
        "kept_time": [
            {"late_share": sample.late_share, "n_overruns": sample.n_overruns}
            for sample in samples
            if sample.late_share is not None
        ],
        "runs_per_sample": [sample.n_runs for sample in samples],
        "samples_accepted_share": [s.accepted_share for s in samples if s.accepted_share is not None],
        "discarded_ns": [round(sample.seconds * 1e9) for sample in series.unused(index)],
        "drifts": [round_.drift for round_ in series.kept],
        "placement": _placement(arm),
        "same_as": arm.same_as,
        "problems": list(arm.problems),
        "predicted": dict(arm.spec.predicted[test.label]) if test.label in arm.spec.predicted else None,
        "bound": None if arm.spec.plan is None or arm.spec.plan.bound is None else asdict(arm.spec.plan.bound),
        "search": [dict(step) for step in arm.spec.search],
        "notes": list(arm.spec.notes),
        "tuning": None if arm.spec.tuning is None else dict(arm.spec.tuning),
        "warnings": [*result.warnings, *arm.report.warnings],
        "interrupted": result.interrupted,
        "idle_cpu_share": arm.idle_cpu_share,
        "settings": {**result.settings, "resident": result.resident},
    }


def _speed_fields(result: BenchResult, series: Series, index: int) -> Row:
    """Nanoseconds and tokens a second, the ratios to the first arm, and the samples behind them."""
    test, samples = series.test, series.samples(index)
    ns = [round(sample.seconds * 1e9) for sample in samples]
    ts = [test.n_tokens / sample.seconds for sample in samples]

    refused = refusal(result.arms, index, len(samples))
    row: Row = {
        "avg_ns": round(mean(ns)),
        "stddev_ns": round(stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": mean(ts),
        "stddev_ts": stdev(ts) if len(ts) > 1 else 0.0,
        "samples_ns": ns,
        "samples_ts": ts,
        **_ratio_fields("", series, index, lambda sample: sample.seconds, refused),
        "ratio_refused": refused,
    }
    parts: tuple[tuple[str, int, Value], ...] = (
        ("ttft", test.n_prompt, lambda sample: sample.prompt_s),  # the last logits of a prompt are the first token's
        ("tpot", test.n_gen, lambda sample: sample.gen_s / max(1, test.n_gen)),
    )
    for name, present, value in parts:
        values = [value(sample) for sample in samples] if present else []
        row[f"{name}_s"] = mean(values) if values else None
        row[f"samples_{name}_s"] = values
        row |= _ratio_fields(f"{name}_", series, index, value, refused)
    return row


def _ratio_fields(prefix: str, series: Series, index: int, value: Value, refused: str | None) -> dict[str, Any]:
    if index == 0:  # what the others refer to
        return {f"{prefix}ratio_to_first": None if refused else 1.0, f"{prefix}ratio_ci95": None}
    ratio = None if refused else ratio_of(series, index, value)
    return {
        f"{prefix}ratio_to_first": ratio.value if ratio else None,
        f"{prefix}ratio_ci95": [ratio.low, ratio.high] if ratio else None,
    }


def _setting_fields(arm: ArmResult) -> Row:
    """llama-bench's fields that do not depend on the test; options that arms cannot change have the default."""
    spec, report = arm.spec, arm.report
    stock = spec.stock
    if spec.plan is not None:
        stock = StockPlacement(spec.plan.n_gpu_layers, n_ubatch=spec.plan.workload.n_ubatch)
    assert stock is not None
    return {
        **report.facts,
        "model_filename": spec.setting.load.path,
        "n_batch": spec.setting.load.n_batch,  # as asked for; llama.cpp lowers it to the context
        "n_ubatch": stock.load(spec.setting.load).n_ubatch,
        "n_threads": report.n_threads,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 50,
        "type_k": spec.setting.load.attention.type_k,
        "type_v": spec.setting.load.attention.type_v,
        "n_gpu_layers": stock.n_gpu_layers,
        "n_cpu_moe": stock.options.n_cpu_moe,
        "split_mode": "layer",
        "main_gpu": 0,
        "no_kv_offload": False,
        "devices": report.device,
        "tensor_split": "0.00",
        "tensor_buft_overrides": _overrides_text(arm),
        "load_mode": "none" if stock.options.moe_cache_bytes else "auto",
        "lazy_mode": "auto",
        "embeddings": False,
        "no_op_offload": 0,
        "no_host": stock.options.no_host,
        "repack": True,
        "fit_target": stock.fit_target_mib,
        "fit_min_ctx": 0,
    }


def _overrides_text(arm: ArmResult) -> str:
    """Overrides as llama-bench writes -ot; for a plan its fingerprint, so that different plans have different keys."""
    if (plan := arm.spec.plan) is not None:
        return f"plan:{plan.fingerprint[:16]}"
    stock = arm.spec.stock
    assert stock is not None
    texts = [f"{pattern}={where}" for pattern, where in stock.overrides[stock.options.n_cpu_moe :]]
    return ";".join(texts) or "none"


def _placement(arm: ArmResult) -> dict[str, Any]:
    """Names of operators on the device and on the host, and shares of split operators."""
    shares = arm.report.shares
    return {
        "device": [name for name, share in shares.items() if share == 1],
        "host": [name for name, share in shares.items() if share == 0],
        "split": {name: share for name, share in shares.items() if 0 < share < 1},
    }


#
# formats
#


FORMATS = ("md", "json")


def formatted(rows: Sequence[Row], format: str) -> str:
    return {"md": markdown, "json": json_text}[format](rows)


def json_text(rows: Sequence[Row]) -> str:
    """A JSON list of objects, one line per field, as in llama-bench, with raw samples and nested fields."""
    return json.dumps([jsonable(row) for row in rows], indent=2, allow_nan=False) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table in llama-bench's terms. Above it: values that are the same in all rows; below it: refused
    ratios, searches and warnings."""
    if not rows:
        return "nothing was measured\n"
    table = [dict(zip(_COLUMNS, _cells(row), strict=True)) for row in rows]
    alike = {name for name in _SETTINGS if len({cells[name] for cells in table}) == 1}
    columns = [name for name in _COLUMNS if name not in alike]
    shared = [f"{name} {table[0][name]}" for name in _SETTINGS if name in alike]
    lines = [*in_lines(", ".join(shared).removeprefix("model ")), ""]
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("| " + " | ".join("---" if name in ("model", "backend", "arm") else "---:" for name in columns) + " |")
    lines += ["| " + " | ".join(cells[name] for name in columns) + " |" for cells in table]
    for sentence in _sentences(rows):
        lines += ["", *in_lines(sentence)]
    return "\n".join(lines) + "\n"


_SETTINGS = ("model", "size", "params", "backend", "ngl", "threads", "n_ubatch", "fa")
_COLUMNS = (*_SETTINGS, "arm", "test", "t/s", "ratio (95 %)", "device MiB")


def _test_label(row: Row) -> str:
    return BenchTest(row["n_prompt"], row["n_gen"], row["n_depth"]).label


def _cells(row: Row) -> list[str]:
    size, params, interval = row["model_size"], row["model_n_params"], row["ratio_ci95"]
    ratio = "-" if row["ratio_to_first"] is None else f"{row['ratio_to_first']:g}"
    if interval is not None:
        ratio = f"{row['ratio_to_first']:.3f} ({interval[0]:.3f}..{interval[1]:.3f})"
    return [
        _cell(row["model_type"]),
        f"{size / MIB:.2f} MiB" if size < GIB else f"{size / GIB:.2f} GiB",
        f"{params / 1e6:.2f} M" if params < 1e9 else f"{params / 1e9:.2f} B",
        _cell(row["backends"]),
        str(row["n_gpu_layers"]),
        str(row["n_threads"]),
        str(row["n_ubatch"]),
        str(row["flash_attn_used"]),
        _cell(row["arm"]),
        _test_label(row),
        f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        ratio,
        f"{row['device_bytes'] / MIB:.1f}",
    ]


def _sentences(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    sentences = _refusals(rows)
    seen: set[str] = set()
    for row in rows:
        if row["arm"] in seen:
            continue
        seen.add(row["arm"])
        if row["search"] and row["search"][0].get("seconds") is not None:
            steps = ", ".join(f"{step['value']} {1e3 * step['seconds']:.1f} ms" for step in row["search"])
            sentences.append(f"{_cell(row['arm'])}: searched {row['search'][0]['flag']}: {steps}.")
        sentences += [f"{_cell(row['arm'])}: {_cell(note)}." for note in row["notes"]]
    caps = {
        row["arm"]: f"{row['cap_device_bytes'] / MIB:.1f} MiB" for row in rows if row["cap_device_bytes"] is not None
    }
    if len(set(caps.values())) == 1:
        sentences.append(f"Cap on the device: {next(iter(caps.values()))} for every arm.")
    elif caps:  # arms on one of several devices
        sentences.append(f"Cap on the devices: {', '.join(f'{_cell(arm)} {cap}' for arm, cap in caps.items())}.")
    if first["cap_operator_bytes"] is not None:
        sentences.append(f"Cap on weights on the device: {first['cap_operator_bytes'] / MIB:.2f} MiB for every arm.")
    warnings = dict.fromkeys(warning for row in rows for warning in row["warnings"])
    sentences += [f"Warning: {_cell(warning)}." for warning in warnings]
    if first["interrupted"]:
        sentences.append("Interrupted: the rows shown are complete, others are missing.")
    sentences.append(f"build: {first['build_commit']} ({first['build_number']})")
    return list(dict.fromkeys(sentences))


def _refusals(rows: Sequence[Row]) -> list[str]:
    """List each reason once, with the rows that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row["ratio_refused"]:
            by_reason.setdefault(row["ratio_refused"], []).append(f"{_cell(row['arm'])} {_test_label(row)}")
    return [
        f"No ratio{'' if len(who) == len(rows) else ' for ' + ', '.join(who)}: {_cell(reason)}."
        for reason, who in by_reason.items()
    ]


def _cell(text: Any) -> str:
    """Text that cannot end a cell or a line; model names are untrusted."""
    return "".join(c if c.isprintable() else " " for c in str(text)).replace("|", "\\|")
