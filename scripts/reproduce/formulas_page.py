"""The part of the page on ScheInfer's own formulas: tables out of docs/benchmarks/scheinfer.json, within the text of
scheinfer.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import table

TEXT = Path(__file__).with_name("scheinfer.md")
CPUS = {"16_threads": "16 threads", "table_i": "Table I"}


def formulas_lines(document: Mapping[str, Any]) -> list[str]:
    """A section, in Markdown."""
    mixtral, llama, mixtral_i, llama_i = (
        [f"{row['gpu_tflops']:.0f}" for row in document["tokens"][cpu] if row["model"] == model]
        for cpu in CPUS
        for model in dict.fromkeys(row["model"] for row in document["tokens"][cpu])
    )
    others = document["other_rates"]
    text = {
        "rates": "\n".join(_rates(document["rates"])).rstrip(),
        "memory": "\n".join(_ablation(document["memory"], "memory_gb", " GB")).rstrip(),
        "tokens": "\n".join(_ablation(document["tokens"], "n_tokens", "", bound=True)).rstrip(),
        "by_threads": ", ".join(f"{mean:.2f}" for mean in document["fixed_means"]["by_threads"]),
        **{key: f"{rate:.3f}" for key, rate in others.items()},
        "implied": "{}, {} and {}".format(*mixtral),
        "implied_i": ", ".join(mixtral_i),
        "implied_llama": "{}, {} and {}".format(*llama),
        "implied_llama_i": ", ".join(llama_i),
    }
    made = TEXT.read_text(encoding="utf-8").strip()
    for key, value in text.items():
        made = made.replace(f"<{key}>", value)
    return [*made.splitlines(), ""]


def _rates(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ("threads", "published", "implied CPU β", "as GB/s", "solved", "with 2 mul-mats", "with 4.5 bits",
               "link at 25 GB/s", "FFN ms", "without CG")  # fmt: skip
    return table(
        columns,
        [
            (row["threads"], f"{row['published_r_cg']:.2f}", f"{row['implied_cpu_beta']:.2e}",
             f"{row['implied_cpu_gb_per_s']:.0f}", f"{row['solved_r_cg']:.3f}",
             f"{row['implied_cpu_beta_two_gemms']:.2e}",
             f"{row['implied_cpu_beta_4.5_bits']:.2e}", f"{row['implied_cpu_beta_link_25_gb_per_s']:.2e}",
             f"{1e3 * row['ffn_s']:.2f}", f"{1e3 * row['ffn_without_cg_s']:.2f}")
            for row in rows
        ],
    )  # fmt: skip


def _ablation(by_cpu: Mapping[str, Any], key: str, unit: str, bound: bool = False) -> list[str]:
    """Published beside predicted with both CPUs."""
    rows = by_cpu["table_i"]
    lines = [("published", *(f"{row['published']:.4g}" for row in rows))]
    lines += [(f"predicted, {name}", *(f"{row['predicted']:.2f}" for row in by_cpu[cpu])) for cpu, name in CPUS.items()]
    if bound:
        lines.append(("bound, Table I", *(f"{row['bound']:.2f}" for row in rows)))
    return table(("", *(f"{row['model']} {row[key]}{unit}" for row in rows)), lines)
