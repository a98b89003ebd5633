"""ScheInfer's own formulas: what the solver returns from the paper's Table I, and the ablations of section V-E as
predictions. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oallama.core.types import StreamSettings
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.timeline import PAPER, timeline
from oallama.place.cuts import pass_seconds, solve_cg, solve_n_g
from oallama.place.knapsack import Assigned, assign
from oallama.place.slicer import N_VALUES
from reproduce import scheinfer_constants as published
from reproduce.scheinfer_constants import CPU, GPU, LAUNCH_S, LINK, RATES
from reproduce.scheinfer_testbed import LLAMA, MIXTRAL, Betas, PaperModel, alone, ffn, streaming

GIB = 2**30
MEASURED_LINK = 1 / 25e9  # PCIe 4.0 x16 as others measure it
Row = dict[str, Any]


def document() -> dict[str, Any]:
    """All of it, as docs/benchmarks/scheinfer.json has it."""
    found = fixed()
    cpus = {"table_i": Betas(), "16_threads": Betas(cpu=implied_cpu_beta(RATES[16]))}
    return {
        "what": "ScheInfer's published numbers and what its own models predict; nothing here was measured",
        "table_i_speeds": table_i_speeds(),
        "rates": rates(),
        "other_rates": other_rates(),
        "sweep": {threads: sweep(threads) for threads in RATES},
        "streams": {"layer": streams(PAPER), "continuous": streams(StreamSettings(2, "ahead"))},
        "fixed": found,
        "fixed_means": fixed_means(found),
        "memory": {name: memory(betas) for name, betas in cpus.items()},
        "tokens": {name: tokens(betas) for name, betas in cpus.items()},
    }


def r_cg(cut: Cut) -> float:
    return cut.cg / cut.extent


def cut_at_rate(block: BlockCost, rate: float) -> Cut:
    """r_CG of `rate`, all the rest CC, at the nearest element."""
    extent = block.block.extent
    cg = round(rate * extent)
    return Cut(extent - cg, cg, 0)


def resident(block: BlockCost) -> Cut:
    return cut_at_rate(block, 0.0)


def implied_cpu_beta(rate: float, n_gemms: int = 3, bytes_per_weight: float = 0.5, link: float = LINK[1]) -> float:
    """The CPU's beta for which r_CG* is `rate` on LLaMA-2-70B at T = 1, r_GG = 0: tau_G of Eq. 10 is n t_C."""
    work = LLAMA.n_embd * LLAMA.n_ff
    tau_g = 2 * LAUNCH_S + n_gemms * (LINK[0] + rate * work * bytes_per_weight * link) + GPU[0] + rate * work * GPU[1]
    return (tau_g / n_gemms - CPU[0]) / ((1 - rate) * work)


def rates() -> list[Row]:
    """For each published rate the CPU that it implies, and what the solver returns from that."""
    rows = []
    for threads, rate in RATES.items():
        betas = Betas(cpu=implied_cpu_beta(rate))
        layer, block = ffn(LLAMA, betas), alone(ffn(LLAMA, betas))
        found, ffn_s = solve_cg(block, streaming(), 0)
        ahead, ahead_s = solve_cg(layer, streaming(StreamSettings(2, "ahead")), 0)
        rows.append(
            {
                "threads": threads,
                "published_r_cg": rate,
                "implied_cpu_beta": betas.cpu,
                "implied_cpu_gb_per_s": published.BYTES_PER_WEIGHT / betas.cpu / 1e9,
                "implied_cpu_beta_two_gemms": implied_cpu_beta(rate, n_gemms=2),
                "implied_cpu_beta_4.5_bits": implied_cpu_beta(rate, bytes_per_weight=0.5625),
                "implied_cpu_beta_link_25_gb_per_s": implied_cpu_beta(rate, link=MEASURED_LINK),
                "solved_r_cg": r_cg(found),
                "ffn_s": ffn_s,
                "ffn_without_cg_s": streaming().seconds(block, resident(block), 1),
                "layer_s": solve_cg(layer, streaming(), 0)[1],
                "continuous_r_cg": r_cg(ahead),
                "continuous_layer_s": ahead_s,
            }
        )
    return rows


def other_rates() -> Row:
    """r_CG* from Table I as printed, whose number of threads is not stated, and for half of what 4 threads imply."""
    half = Betas(cpu=2 * implied_cpu_beta(RATES[4]))
    cases = {
        "table_i": (Betas(), LINK[1]),
        "table_i_4.5_bits": (Betas(bytes_per_weight=0.5625), LINK[1]),
        "table_i_link_25_gb_per_s": (Betas(), MEASURED_LINK),
        "half_of_4_threads": (half, LINK[1]),
    }
    return {
        name: r_cg(solve_cg(alone(ffn(LLAMA, betas)), streaming(link=link), 0)[0])
        for name, (betas, link) in cases.items()
    }


def sweep(threads: int, points: int = 65) -> list[tuple[float, float]]:
    """(r_CG, seconds) of LLaMA's FFN, as a curve to draw."""
    block = alone(ffn(LLAMA, Betas(cpu=implied_cpu_beta(RATES[threads]))))
    return [
        (r, streaming().seconds(block, cut_at_rate(block, r), 1)) for r in (i / (points - 1) for i in range(points))
    ]


def streams(ahead: StreamSettings, threads: int = 16, n_shown: int = 3, n_before: int = 5) -> Row:
    """The four streams over some of LLaMA's layers in decode, once copies run as far ahead as they will. Times are from
    the first shown layer's beginning, seconds."""
    streams, layer = streaming(ahead), ffn(LLAMA, Betas(cpu=implied_cpu_beta(RATES[threads])))
    made, _ = solve_cg(layer, streams, 0)
    ran = timeline([streams.block_times(layer, made, 1)] * (n_before + n_shown + 1), ahead)
    start, end = (ran.block_ends_s[n_before + i - 1] for i in (0, n_shown))
    spans = [
        {"stream": s.stream, "layer": s.block - n_before, "start_s": s.start_s - start, "end_s": s.end_s - start}
        for s in ran.spans
        if s.end_s > start and s.start_s < end
    ]
    copies = [span for span in spans if span["stream"] == "copy"]
    busy_s = sum(min(float(span["end_s"]), end - start) - max(float(span["start_s"]), 0.0) for span in copies)
    return {
        "r_cg": r_cg(made),
        "seconds": end - start,
        "attention_s": layer.gap[0][1],
        "layer_ends_s": [e - start for e in ran.block_ends_s[n_before : n_before + n_shown]],
        "link_busy": busy_s / (end - start),
        "spans": spans,
    }


def fixed() -> list[Row]:
    """V-E2: speed-up of the solved rate over fixed ones; whole layers in decode with r_GG = 0."""
    streams = streaming()
    rows = []
    for model in (MIXTRAL, LLAMA):
        for threads, rate in RATES.items():
            block = ffn(model, Betas(cpu=implied_cpu_beta(rate)))
            best, best_s = solve_cg(block, streams, 0)
            slower = {r: streams.seconds(block, cut_at_rate(block, r), 1) / best_s for r in published.FIXED}
            rows.append({"model": model.name, "threads": threads, "solved_r_cg": r_cg(best), "speed_up": slower})
    return rows


def fixed_means(rows: list[Row]) -> Row:
    """Published and predicted, averaged over models and threads for each fixed rate; and over models and fixed rates
    for each number of threads, which is the other way to read the paper's sentence."""
    return {
        "published": list(published.FIXED.values()),
        "by_fixed_rate": [statistics.fmean(row["speed_up"][r] for row in rows) for r in published.FIXED],
        "by_threads": [
            statistics.fmean(s for row in rows if row["threads"] == threads for s in row["speed_up"].values())
            for threads in RATES
        ],
    }


def memory(betas: Betas) -> list[Row]:
    """V-E3: decode with r_GG assigned by Eq. 14, against r_GG of 0 or 1."""
    rows = []
    for model in (MIXTRAL, LLAMA):
        for gb, speed_up in published.MEMORY[model.name].items():
            choices, assigned, whole = _assigned(model, betas, gb)
            n_with = sum(0 < choices[i].gg < model.n_ff or i == 0 for i in assigned.chosen)
            n_without = sum(i == 0 for i in whole.chosen)
            missing = (whole.seconds - speed_up * assigned.seconds) / (speed_up * n_with - n_without)
            rows.append(
                {
                    "model": model.name,
                    "memory_gb": gb,
                    "published": speed_up,
                    "predicted": whole.seconds / assigned.seconds,
                    "mean_r_gg": statistics.fmean(choices[i].gg / model.n_ff for i in assigned.chosen),
                    "token_s": assigned.seconds,
                    "unmodelled_s_per_split_layer": missing,
                }
            )
    return rows


def _assigned(model: PaperModel, betas: Betas, gb: float) -> tuple[tuple[Cut, ...], Assigned, Assigned]:
    """(choices of one layer, r_GG by Eq. 14, r_GG of 0 or 1 with indices into the first and last choice) in what the
    rest of the model leaves of the device's memory."""
    block = ffn(model, betas)
    extent, step = block.block.extent, block.block.step
    sizes = sorted({extent - round((1 - i / N_VALUES) * extent / step) * step for i in range(N_VALUES + 1)})
    solved = [solve_cg(block, streaming(), gg) for gg in sizes]
    menu = tuple((block.block.weight_bytes(cut.gg), seconds) for cut, seconds in solved)
    room = round(gb * GIB - model.other_bytes())
    assigned, whole = (assign([m] * model.n_layer, room) for m in (menu, (menu[0], menu[-1])))
    return tuple(cut for cut, _ in solved), assigned, whole


def tokens(betas: Betas) -> list[Row]:
    """V-E4: prompts with n_g* against n_g = 0, rates as in decode. `bound`: if copies took no time. `gpu_tflops`: at
    which speed of the GPU on prompts the models would give the published number."""
    rows = []
    for model in (MIXTRAL, LLAMA):
        gb, speed_ups = published.TOKENS[model.name]
        choices, assigned, _ = _assigned(model, betas, gb)
        made = [choices[i] for i in assigned.chosen]
        for n_tokens, speed_up in speed_ups.items():
            layers = _prompt_layers(model, betas, made)
            n_g, with_s = solve_n_g(layers, streaming(), n_tokens)
            without_s = pass_seconds(layers, streaming(), n_tokens, 0)
            free = streaming(link=0.0, link_alpha=0.0)
            beta = _implied_gpu_beta(model, betas, made, n_tokens, speed_up)
            rows.append(
                {
                    "model": model.name,
                    "n_tokens": n_tokens,
                    "published": speed_up,
                    "predicted": without_s / with_s,
                    "bound": without_s / solve_n_g(layers, free, n_tokens)[1],
                    "n_g": n_g,
                    "prompt_s": with_s,
                    "gpu_tflops": 2e-12 / beta if beta else None,
                }
            )
    return rows


def _prompt_layers(model: PaperModel, betas: Betas, made: list[Cut]) -> list[tuple[BlockCost, Cut]]:
    block = ffn(model, betas, decode=False)
    return [(block, cut) for cut in made]


def _implied_gpu_beta(model: PaperModel, betas: Betas, made: list[Cut], n_tokens: int, speed_up: float) -> float | None:
    """The GPU's beta on prompts for which n_g* gains `speed_up`; None: no GPU is fast enough, the link limits."""

    def gain(gpu: float) -> float:
        layers = _prompt_layers(model, replace(betas, gpu=gpu), made)
        return pass_seconds(layers, streaming(), n_tokens, 0) / solve_n_g(layers, streaming(), n_tokens)[1]

    return _where(lambda gpu: gain(gpu) >= speed_up, 1e-16, 1e-11)


def _where(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """The largest x in low..high for which a condition holds that fails for all larger ones; None: for none."""
    if not holds(low):
        return None
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def table_i_speeds() -> list[Row]:
    """What the betas of Table I are as rates of memory and link, beside the hardware's peaks."""
    rows = []
    for testbed, (gpu16, gpu4, cpu16, cpu4, link) in published.TABLE_I_BETA.items():
        memory_peak, link_peak = published.PEAK_GB_PER_S[testbed]
        gb = {
            "gpu_fp16": 2 / gpu16,
            "gpu_int4": 0.5 / gpu4,
            "cpu_fp16": 2 / cpu16,
            "cpu_int4": 0.5 / cpu4,
            "link": 1 / link,
        }
        speeds = {f"{name}_gb_per_s": rate / 1e9 for name, rate in gb.items()}
        rows.append({"testbed": testbed, **speeds, "gpu_peak_gb_per_s": memory_peak, "link_peak_gb_per_s": link_peak})
    return rows
