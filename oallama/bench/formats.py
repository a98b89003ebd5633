"""Rows as text: md, csv, json, jsonl, sql, as llama-bench's -o offers them. Pure."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from oallama.bench.records import BenchTest
from oallama.bench.rows import BOOL, LLAMA_BENCH_FIELDS, OUR_FIELDS, Row
from oallama.core.codec import finite
from oallama.core.units import GIB, MIB

FORMATS = ("md", "csv", "json", "jsonl", "sql")

FIELDS: Mapping[str, str] = {**LLAMA_BENCH_FIELDS, **OUR_FIELDS}
TABLE = "llama_bench"


def formatted(rows: Sequence[Row], format: str) -> str:
    return {"md": markdown, "csv": comma_separated, "json": json_text, "jsonl": json_lines, "sql": sql}[format](rows)


def json_text(rows: Sequence[Row]) -> str:
    """One list of objects, one line a field, as llama-bench; raw samples and all that is nested included."""
    return json.dumps([finite(row) for row in rows], indent=2, allow_nan=False) + "\n"


def json_lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)


def comma_separated(rows: Sequence[Row]) -> str:
    """A line of names, then all values quoted, as llama-bench; nothing for what is missing."""
    out = io.StringIO()
    out.write(",".join(FIELDS) + "\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if (value := _flat(row, name)) is None else value for name in FIELDS])
    return out.getvalue()


def sql(rows: Sequence[Row]) -> str:
    """Statements for sqlite3 and others: the table llama_bench, ours columns behind llama-bench's."""
    columns = ",\n".join(f"  {name} {'INTEGER' if kind == BOOL else kind}" for name, kind in FIELDS.items())
    statements = [f"CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n"]
    names = ", ".join(FIELDS)
    for row in rows:
        values = ", ".join(_sql_value(_flat(row, name)) for name in FIELDS)
        statements.append(f"INSERT INTO {TABLE} ({names}) VALUES ({values});")
    return "\n".join(statements) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """The table for people: llama-bench's columns, then arm, ratio to the first arm and its interval, device MiB;
    below it what was refused, searched, and warned of. The micro-batch is shown where arms differ in it."""
    if not rows:
        return "nothing was measured\n"
    alike = len({row["n_ubatch"] for row in rows}) == 1
    columns = [column for column in _COLUMNS if not (alike and column == _UBATCH)]
    lines = ["| " + " | ".join(name for name, _ in columns) + " |"]
    lines.append("| " + " | ".join("---:" if right else "---" for _, right in columns) + " |")
    for row in rows:
        cells = zip(_COLUMNS, _cells(row), strict=True)
        lines.append("| " + " | ".join(cell for column, cell in cells if column in columns) + " |")
    for sentence in _sentences(rows):
        lines += ["", sentence]
    return "\n".join(lines) + "\n"


_UBATCH = ("n_ubatch", True)
_COLUMNS = (
    ("model", False), ("size", True), ("params", True), ("backend", False), ("ngl", True), ("threads", True),
    _UBATCH, ("fa", True), ("arm", False), ("test", True), ("t/s", True), ("ratio (95 %)", True), ("device MiB", True),
)  # fmt: skip


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
    found = _refusals(rows)
    seen: set[str] = set()
    for row in rows:
        if row["arm"] in seen:
            continue
        seen.add(row["arm"])
        if row["search"] and row["search"][0].get("seconds") is not None:
            steps = ", ".join(f"{step['value']} {1e3 * step['seconds']:.1f} ms" for step in row["search"])
            found.append(f"{_cell(row['arm'])}: searched {row['search'][0]['flag']}: {steps}.")
        found += [f"{_cell(row['arm'])}: {_cell(note)}." for note in row["notes"]]
    if first["cap_device_bytes"] is not None:
        found.append(f"Cap on the device: {first['cap_device_bytes'] / MIB:.1f} MiB for every arm.")
    if first["cap_operator_bytes"] is not None:
        found.append(f"Cap on weights there: {first['cap_operator_bytes'] / MIB:.2f} MiB for every arm.")
    warnings = dict.fromkeys(warning for row in rows for warning in row["warnings"])
    found += [f"Warning: {_cell(warning)}." for warning in warnings]
    if first["interrupted"]:
        found.append("Interrupted: what is shown is complete, more was to come.")
    found.append(f"build: {first['build_commit']} ({first['build_number']})")
    return list(dict.fromkeys(found))


def _refusals(rows: Sequence[Row]) -> list[str]:
    """Each reason once, with the rows that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row["ratio_refused"]:
            by_reason.setdefault(row["ratio_refused"], []).append(f"{_cell(row['arm'])} {_test_label(row)}")
    return [
        f"No ratio{'' if len(who) == len(rows) else ' for ' + ', '.join(who)}: {_cell(reason)}."
        for reason, who in by_reason.items()
    ]


def _cell(text: Any) -> str:
    """Text that cannot end a cell or a line; models name themselves."""
    return "".join(c if c.isprintable() else " " for c in str(text)).replace("|", "\\|")


def _flat(row: Row, name: str) -> Any:
    """A value as csv and sql take it: numbers, text, lists as JSON, truth as 0 or 1; None where there is none."""
    value = row[name]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return json.dumps(value) if isinstance(value, list | dict) else value


def _sql_value(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int | float):
        return repr(value)
    return "'" + str(value).replace("\0", "").replace("'", "''") + "'"
