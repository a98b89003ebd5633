"""The report of `oallama profile`: tables of what was measured. Its JSON is the profile itself (profile/store.py)."""

from __future__ import annotations

from oallama.core.profile import Case, LinearFit, Profile, ProfileCase
from oallama.core.types import CPU_DEVICE
from oallama.core.units import format_seconds
from oallama.report.table import Table, table
from oallama.report.text import printable, shape_text, three_digits


def profile_tables(profile: Profile) -> tuple[Table, ...]:
    """Cases, link fits and work at the same time of a profile; tables that would be empty are left out."""
    cases = [
        (*_cells(c), format_seconds(c.seconds), three_digits(c.gb_per_s), three_digits(c.gflops))
        for c in sorted(profile.cases, key=_case_order)
    ]
    tables = [table("Mul-mats", "device |layout |type |>shape |>tokens |>median |>GB/s |>GFLOP/s", cases)]
    link_fits = dict(profile.link)
    if profile.boundary is not None:
        link_fits["boundary"] = profile.boundary
    if link_fits:
        tables.append(
            table("Link", "path |>latency |>GB/s |>r²", (_fit_row(name, fit) for name, fit in link_fits.items()))
        )
    if profile.sharing:
        rates = [
            (
                f"{s.first} and {s.second}",
                str(s.n_tokens),
                f"{three_digits(s.first_alone_gb_per_s)}, {three_digits(s.second_alone_gb_per_s)}",
                f"{three_digits(s.first_with_second_gb_per_s)}, {three_digits(s.second_with_first_gb_per_s)}",
            )
            for s in profile.sharing
        ]
        tables.append(table("At the same time, GB/s", "who |>tokens |>each alone |>both at once", rates))
    if profile.skipped:
        left_out = [(*_cells(s), printable(s.reason)) for s in profile.skipped]
        tables.append(table("Left out", "device |layout |type |>shape |>tokens |reason", left_out))
    return tuple(tables)


def _cells(case: Case) -> tuple[str, ...]:
    """Return the cells that name a case: device, layout, type, shape, tokens."""
    mul_mat = case.mul_mat
    return printable(case.device), case.layout, mul_mat.type, shape_text(mul_mat.shape), str(case.n_tokens)


def _case_order(case: ProfileCase) -> tuple[object, ...]:
    return (case.mul_mat.type, case.mul_mat.shape, case.n_tokens, case.device != CPU_DEVICE, case.layout)


def _fit_row(name: str, fit: LinearFit) -> tuple[str, ...]:
    rate = three_digits(1e-9 / fit.beta_s_per_byte) if fit.beta_s_per_byte > 0 else "-"
    return name, format_seconds(fit.alpha_s), rate, f"{fit.r2:.4f}"
