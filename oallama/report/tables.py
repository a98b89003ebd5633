"""Tables of the other commands: the model's operators, devices, profile. Records in, Table records out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oallama.core.types import CPU_DEVICE, DeviceInfo, LinearFit, ModelInfo, Operator, Profile, ProfileCase
from oallama.core.units import format_bytes, format_seconds
from oallama.report.table import Table, table
from oallama.report.text import model_title, percent, plural, printable, ranges_text, shape_text


def model_lines(model: ModelInfo) -> tuple[str, ...]:
    """Header lines of `inspect`."""
    experts = f", {model.n_expert_used} of {model.n_expert} experts per token" if model.n_expert else ""
    return (
        f"{model_title(model)}: {printable(model.arch)}, {plural(model.n_layer, 'layer')}, "
        f"{format_bytes(model.file_bytes)}",
        f"embedding {model.n_embd}, feed-forward {model.n_ff}, heads {model.n_head} ({model.n_head_kv} KV){experts}",
        f"vocabulary {model.n_vocab}, trained context {model.n_ctx_train}",
        f"file {printable(model.path, 400)}",
    )


def operator_table(operators: Sequence[Operator], every_row: bool = False) -> Table:
    """Operators in graph order, or grouped by role, type and shape (in the order in which they first appear)."""
    total = sum(o.bytes for o in operators)
    footer = (f"{plural(len(operators), 'operator')}, {format_bytes(total)} of weights.",)
    if every_row:
        rows = [
            (printable(o.name), o.op, printable(o.type), shape_text(o.shape), format_bytes(o.bytes), _active(o))
            for o in operators
        ]
        return table("", "operator |op |type |>shape |>bytes |>active", rows, footer)
    groups: dict[tuple[object, ...], list[Operator]] = {}
    for o in operators:
        groups.setdefault((o.role, o.op, o.type, o.shape, o.active_fraction), []).append(o)
    grouped = [
        (
            printable(group[0].role),
            ranges_text(o.layer for o in group if o.layer is not None) or "-",
            str(len(group)),
            group[0].op,
            printable(group[0].type),
            shape_text(group[0].shape),
            format_bytes(sum(o.bytes for o in group)),
            percent(sum(o.bytes for o in group), total),
            _active(group[0]),
        )
        for group in groups.values()
    ]
    return table("", "role |layers |>count |op |type |>shape |>bytes |>share |>active", grouped, footer)


def _active(operator: Operator) -> str:
    return "1" if operator.active_fraction == 1 else f"{operator.active_fraction:.4g}"


def devices_table(devices: Iterable[DeviceInfo], footer: Sequence[str] = ()) -> Table:
    """ggml's devices, one a row; sentences about the rest of the machine below."""
    rows = [
        (
            printable(d.name),
            d.type,
            d.backend,
            format_bytes(d.memory_total),
            format_bytes(d.memory_free),
            *("yes" if flag else "no" for flag in (d.asynchronous, d.host_buffer, d.events)),
            printable(d.description, 60),
        )
        for d in devices
    ]
    return table("", "name |type |backend |>memory |>free |async |host buffer |events |description", rows, footer)


def profile_tables(profile: Profile) -> tuple[Table, ...]:
    """Cases, link fits and contention of a profile; tables that would be empty are left out."""
    cases = [
        (
            printable(c.device),
            c.layout,
            c.mul_mat.type,
            shape_text(c.mul_mat.shape),
            str(c.n_tokens),
            format_seconds(c.seconds),
            f"{c.gb_per_s:.3g}",
            f"{c.gflops:.3g}",
        )
        for c in sorted(profile.cases, key=_case_order)
    ]
    tables = [table("Mul-mats", "device |layout |type |>shape |>tokens |>median |>GB/s |>GFLOP/s", cases)]
    fits = dict(profile.link)
    if profile.boundary is not None:
        fits["boundary"] = profile.boundary
    if fits:
        tables.append(table("Link", "path |>latency |>GB/s |>r²", (_fit_row(name, fit) for name, fit in fits.items())))
    if profile.contention is not None:
        c = profile.contention
        rows = [
            ("CPU reading weights", f"{c.first_alone_gb_per_s:.3g}", f"{c.first_with_second_gb_per_s:.3g}"),
            ("link", f"{c.second_alone_gb_per_s:.3g}", f"{c.second_with_first_gb_per_s:.3g}"),
        ]
        tables.append(table("Contention for memory, GB/s", "who |>alone |>both at once", rows))
    measured = [sharing for sharing in profile.sharing if not sharing.assumed]
    if measured:
        rates = [
            (
                f"{s.first} and {s.second}",
                str(s.n_tokens),
                f"{s.first_alone_gb_per_s:.3g}, {s.second_alone_gb_per_s:.3g}",
                f"{s.first_with_second_gb_per_s:.3g}, {s.second_with_first_gb_per_s:.3g}",
            )
            for s in measured
        ]
        tables.append(table("At the same time, GB/s", "who |>tokens |>each alone |>both at once", rates))
    if profile.skipped:
        left_out = [
            (
                printable(s.device),
                s.layout,
                s.mul_mat.type,
                shape_text(s.mul_mat.shape),
                str(s.n_tokens),
                printable(s.reason),
            )
            for s in profile.skipped
        ]
        tables.append(table("Left out", "device |layout |type |>shape |>tokens |reason", left_out))
    return tuple(tables)


def _case_order(case: ProfileCase) -> tuple[object, ...]:
    return (case.mul_mat.type, case.mul_mat.shape, case.n_tokens, case.device != CPU_DEVICE, case.layout)


def _fit_row(name: str, fit: LinearFit) -> tuple[str, ...]:
    rate = f"{1e-9 / fit.beta_s_per_byte:.3g}" if fit.beta_s_per_byte > 0 else "-"
    return name, format_seconds(fit.alpha_s), rate, f"{fit.r2:.4f}"
