"""Tables of one results file, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.comparison import compare_with_stock
from experiments.pages import ms, table
from reproduce.figures import least_and_most, published

Results = Mapping[str, Any]


def of_kind(document: Results, kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Steps of a kind that found something, in the order in which they ran."""
    return [(name, step) for name, step in document["steps"].items() if step["kind"] == kind and step.get("data")]


def machine_line(document: Results) -> str:
    """One sentence on what measured."""
    found = document["steps"].get("machine", {}).get("data") or {}
    print_ = found.get("fingerprint", {})
    cards = ", ".join(card["name"] for card in found.get("cards", [])) or "no NVIDIA card"
    gib = round(print_.get("memory_bytes", 0) / 2**30)
    call = document["calls"][-1]
    pinned = f", arms pinned to CPUs {call['cpus']}" if call.get("cpus") else ""
    return (
        f"{print_.get('cpu', 'unknown CPU')}, {print_.get('cores_allowed', '?')} cores, {gib} GiB; {cards}; device "
        f"`{document['device']}`, scale `{document['scale']}`, {call['threads']} threads{pinned}; "
        f"llama-cpp-python {print_.get('llama_cpp_python', '?')}; {document['calls'][0]['began'][:10]}, "
        f"{len(document['calls'])} calls"
    )


def steps_table(document: Results) -> list[str]:
    rows = [
        (name, step["state"], f"{step['seconds']:.0f}", step.get("error") or "")
        for name, step in document["steps"].items()
    ]
    return table(("step", "state", "s", "what went wrong"), rows)


def correctness_table(document: Results) -> list[str]:
    rows, wrong = [], []
    for name, step in of_kind(document, "correctness"):
        cases = step["data"]
        good = [case for case in cases if case["verdict"] == "ok"]
        worst = max((max(case["nmse_decode"], case["nmse_prefill"]) for case in good), default=0.0)
        types = len({case["type"] for case in cases})
        rows.append((name.removeprefix("correctness-"), f"{len(good)} of {len(cases)}", types, f"{worst:.1e}"))
        wrong += [(name.removeprefix("correctness-"), case["arch"], case["type"], case["verdict"])
                  for case in cases if case["verdict"] != "ok"]  # fmt: skip
    return [
        *table(("mode", "cases right", "types", "largest NMSE of these"), rows),
        *table(("mode", "architecture", "type", "what is wrong"), wrong),
    ]


def profile_table(document: Results) -> list[str]:
    rows = []
    for _, step in of_kind(document, "profile"):
        data = step["data"]
        link, both = data["link"], data["contention"] or {}

        def rate(name: str, link: Mapping[str, Any] = link) -> str:
            beta = link.get(name, {}).get("beta_s_per_byte")
            return f"{1e-9 / beta:.1f}" if beta else "-"

        def gb(key: str, both: Mapping[str, Any] = both) -> str:
            return f"{both[key]:.1f}" if key in both else "-"

        rows.append((
            data["model"], data["threads"], rate("h2d_pinned"), rate("h2d_pageable"), rate("d2h"),
            f"{gb('cpu_alone_gb_per_s')} / {gb('cpu_with_link_gb_per_s')}",
            f"{gb('link_alone_gb_per_s')} / {gb('link_with_cpu_gb_per_s')}", f"{1e6 * data['launch_s']:.0f}",
        ))  # fmt: skip
    columns = ("model", "threads", "to the device, pinned", "pageable", "back", "CPU alone / beside copies",
               "link alone / beside the CPU", "launch µs")  # fmt: skip
    return table(columns, rows)


ALIKE = 4.0
"""How many times as long one of two things may take for their overlap to say anything."""


def hidden(row: Mapping[str, Any]) -> str:
    """Of results from before `sharing`: the share of the shorter one of copy and mul-mats that the other covered."""
    times = row["copy"]["seconds"], row["compute"]["seconds"]
    return f"{100 * row['hidden']:.0f} %" if max(times) <= ALIKE * min(times) else "too unlike"


def device_tables(document: Results) -> list[str]:
    lines: list[str] = []
    for _, step in of_kind(document, "device"):
        rows = step["data"]
        lines += table(
            ("copy of", "MiB", "GB/s", "copy ms", "mul-mats ms", "both ms", "hidden"),
            [
                ("pinned" if row["pinned"] else "pageable", row["n_bytes"] >> 20, f"{row['copy_gb_per_s']:.1f}",
                 ms(row["copy"]["seconds"]), ms(row["compute"]["seconds"]), ms(row["both"]["seconds"]),
                 hidden(row))
                for row in rows if row["what"] == "overlap" and "hidden" in row
            ],
        )  # fmt: skip
        rates = ("first_alone", "first_with_second", "second_alone", "second_with_first")
        lines += table(
            ("tokens", "mul-mats alone, GB/s", "beside copies", "copies alone, GB/s", "beside mul-mats"),
            [
                (row["n_tokens"], *(f"{row[key] / 1e9:.3g}" for key in rates))
                for row in rows if row["what"] == "sharing"
            ],
        )  # fmt: skip
        lines += table(
            ("MiB", "pinned, ms", "plain, ms"),
            [
                (row["n_bytes"] >> 20, ms(row["pinned_s"]) if row["pinned_s"] else "none", ms(row["plain_s"]))
                for row in rows if row["what"] == "pinned"
            ],
        )  # fmt: skip
        cells = [row for row in rows if row["what"] == "slice"]
        counts = list(dict.fromkeys(row["rows"] for row in cells))
        lines += table(
            ("type", "tokens", *(f"{n} rows" for n in counts)),
            [
                (kind, n, *(f"{row['gflops']:.3g}" for row in cells if (row["type"], row["n_tokens"]) == (kind, n)))
                for kind, n in dict.fromkeys((row["type"], row["n_tokens"]) for row in cells)
            ],
        )
        lines += [f"Not measured: {row.get('error') or row['missing']}." for row in rows
                  if row["what"] == "error" or "missing" in row] + [""]  # fmt: skip
    return lines


def workload(data: Mapping[str, Any]) -> str:
    return f"{data['n_prompt']} + {data['n_gen']} tokens" + (
        f", -ub {data['n_ubatch']}" if data.get("n_ubatch") else ""
    )


def ab_tables(document: Results, with_papers: bool = True) -> list[str]:
    """One table a cell: what every arm did, against the best stock arm of the cell, beside the bound and the papers'
    figures, which a rehearsal is not put beside."""
    lines: list[str] = []
    for _, step in of_kind(document, "ab"):
        data = step["data"]
        rows = data["rows"]
        cell = workload(data)
        lines += [
            f"**{data['model']}, {data['cap']}, {cell}**" + (" (cut short)" if step["state"] != "done" else ""),
            "",
        ]
        place = (document["device"], data["model"], data["cap"], cell)
        ratios = {
            metric: {found.arm: found for found in compare_with_stock(place, rows, metric)}
            for metric in ("ttft", "tpot", "total")
        }
        best = next((a.stock for a in ratios["total"].values()), "")

        def ratio(metric: str, arm: str, ratios: Mapping[str, Any] = ratios) -> str:
            return ratios[metric][arm].text(2) if arm in ratios[metric] else ""

        lines += table(
            ("arm", "TTFT ms", "TPOT ms", "device MiB", "TTFT ×", "TPOT ×", "whole run ×"),
            [
                (row["arm"], ms(row["ttft_s"]), ms(row["tpot_s"]), f"{row['device_bytes'] / 2**20:.0f}",
                 *(ratio(metric, row["arm"]) for metric in ("ttft", "tpot", "total")))
                for row in rows
            ],
        )  # fmt: skip
        bound = _bound(data, with_papers)
        lines += [f"× : times as fast as the best stock arm of the cell (whole run: {best}). {bound}".rstrip(), ""]
    return lines


def _bound(data: Mapping[str, Any], with_papers: bool) -> str:
    """What no placement in any arm's memory can beat, as `oallama bench` reckons it, and the paper's figure."""
    parts = []
    bounds = [row["bound"] for row in data["rows"] if row.get("bound")]
    if bounds:
        ttft_s, tpot_s = (min(bound[key] for bound in bounds) for key in ("ttft_s", "tpot_s"))
        parts.append(f"No placement takes less than TTFT {ms(ttft_s)} ms, TPOT {ms(tpot_s)} ms.")
    if with_papers and data["paper"] == "oato":
        parts.append(f"The paper: {oato_gain(data['cap'])} than llama.cpp (RTX 4090, F16).")
    if with_papers and data["paper"] == "scheinfer":
        parts.append(
            f"The paper, all its cells: prompt {least_and_most('prompt')}, generation {least_and_most('generation')} "
            "times llama.cpp or Fiddler."
        )
    return " ".join(parts)


def oato_gain(share: str) -> str:
    """Zhang et al., J. NUDT 47(6), 2025, section 4.5 (Fig. 10), with so much of the weights on the card."""
    return per_cent(published()[f"oato/fig10-{share.removesuffix('%')}-llama.cpp"])


def per_cent(speed_up: float) -> str:
    return f"{100 * (speed_up - 1):.1f} % faster"


def timeline_tables(document: Results) -> list[str]:
    lines: list[str] = []
    for _, step in of_kind(document, "timeline"):
        rows = step["data"]
        stages = [row for row in rows if row["what"] == "stages"]
        lines += table(
            ("plan", "TTFT ms", "TPOT ms", "of a token: launching", "computing CC", "waiting", "joining", "phases"),
            [
                (row["plan"], ms(row["ttft_s"]), ms(row["tpot_s"]),
                 *(ms(row["token"][key]) for key in ("launch_s", "host_s", "wait_s", "join_s")),
                 f"{row['decode']['n_phases'] / max(row['n_decoded'], 1):.0f}")
                for row in stages if "token" in row
            ],
        )  # fmt: skip
        lines += table(
            ("plan", "of", "ms", "CC", "device computes", "beside CC", "link copies", "beside that", "stalled", "MB"),
            [
                (row["plan"], what, *_traced(row[what]["sums"]))
                for row in rows if row["what"] == "trace" for what in ("token", "prompt")
            ],
        )  # fmt: skip
        kernels = [row for row in rows if row["what"].endswith("kernels")]
        lines += table(
            ("CUDA's own records", "kernels µs", "copies to the device µs", "both at once µs", "streams"),
            [
                (f"{row['plan']}, {row['what']}",
                 *(f"{row['overlap'][key]:.0f}" for key in ("kernel_us", "copy_us", "both_us")),
                 ", ".join(row["streams"]))
                for row in kernels if "overlap" in row
            ],
        )  # fmt: skip
        lines += [f"Not measured ({row['plan']}, {row['what']}): {row['missing']}." for row in rows if "missing" in row]
        lines += [""] if any("missing" in row for row in rows) else []
        for row in stages:
            if "token" not in row:
                lines += [
                    f"Nothing is split here: TTFT {ms(row['ttft_s'])} ms, TPOT {ms(row['tpot_s'])} ms.",
                    "",
                ]
    return lines


def switches_table(document: Results) -> list[str]:
    rows = [
        (row["switch"], " ".join(f"`{key}={value}`" for key, value in row["environment"].items()), row["plan"],
         f"{row['ttft_ratio']:.2f}", f"{row['tpot_ratio']:.2f}")
        for _, step in of_kind(document, "switches") for row in step["data"]
    ]  # fmt: skip
    return table(("switched", "environment", "plan", "TTFT × of not", "TPOT × of not"), rows)


def _traced(sums: Mapping[str, float]) -> list[str]:
    own = [ms(sums.get(key, 0.0)) for key in ("span_s", "host_s")]
    if "device_s" not in sums:
        return [*own, *["not traced"] * 6]
    keys = ("device_s", "host_beside_device_s", "copy_s", "copy_beside_device_s", "stall_s")
    return [*own, *(ms(sums.get(key, 0.0)) for key in keys), f"{sums['bytes_copied'] / 1e6:.1f}"]
