"""The report of `oallama what-if`: JSON document and table. All values are predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oallama.core.types import ModelInfo, Predicted, Workload
from oallama.core.units import format_bytes, format_seconds
from oallama.device.card import Host
from oallama.planner.placement import VerifiedPlan, n_gpu_layers
from oallama.planner.pure_plan import WhatIf
from oallama.report.operators import step_text
from oallama.report.table import Table, table
from oallama.report.text import model_title, rate_text, three_digits

CLAIM = "predicted from published rates of the cards, not measured"


def what_if_document(
    model: ModelInfo, workload: Workload, cpu_plan: VerifiedPlan, rows: Sequence[WhatIf], host: Host | None = None
) -> dict[str, Any]:
    """Seconds and bytes. `cpu` is this machine by itself, or the described one."""
    return {
        "emulated": True,
        "source": CLAIM,
        "model": {"path": model.path, "arch": model.arch, "n_layer": model.n_layer, "file_bytes": model.file_bytes},
        "workload": {
            "n_prompt": workload.n_prompt,
            "n_gen": workload.n_gen,
            "n_ctx": workload.n_ctx,
            "n_parallel": workload.step.n_parallel,
        },
        "cpu": {
            "ttft_s": cpu_plan.predicted.ttft_s,
            "tpot_s": cpu_plan.predicted.tpot_s,
            "described": None if host is None else host.name,
        },
        "rows": [_row(model, row) for row in rows],
    }


def _row(model: ModelInfo, row: WhatIf) -> dict[str, Any]:
    stock, best = row.stock, row.best
    return {
        "gpu": row.name,
        "vram": row.memory_bytes,
        "policy": best.policy,
        "ttft_s": best.predicted.ttft_s,
        "tpot_s": best.predicted.tpot_s,
        "stock": stock.policy,
        "stock_ttft_s": stock.predicted.ttft_s,
        "stock_tpot_s": stock.predicted.tpot_s,
        "gain": row.gain,
        "fits_whole": row.fits_whole,
        "stock_n_gpu_layers": n_gpu_layers(model.n_layer, stock.placement),
        "stock_device_bytes": _used_bytes(stock),
        "device_bytes": _used_bytes(best),
        "description": " + ".join(card.description for card in row.cards),
        **({} if len(row.cards) == 1 else {"cards": [_device(row, n, model.n_layer) for n in range(len(row.cards))]}),
    }


def _device(row: WhatIf, number: int, n_layer: int) -> dict[str, Any]:
    """List the layers and bytes of one of several cards under stock's plan and under the best. The output counts as a
    layer. Only the first card that is used has slices."""
    stock_layers, stock_bytes = _share(row.stock, row.stock_cards, number, n_layer)
    n_layers, n_bytes = _share(row.best, row.best_cards, number, n_layer)
    return {
        "gpu": row.cards[number].name,
        "n_layers": n_layers,
        "has_slices": number in row.best_cards[:1] and row.best.placement.is_sliced,
        "device_bytes": n_bytes,
        "stock_n_layers": stock_layers,
        "stock_device_bytes": stock_bytes,
    }


def _share(plan: VerifiedPlan, used_cards: tuple[int, ...], number: int, n_layer: int) -> tuple[int, int]:
    """(layers, bytes) of a card under a plan. used_cards: the numbers of the cards that it uses."""
    if number not in used_cards:
        return 0, 0
    if not plan.placement.device_layers:
        return n_gpu_layers(n_layer, plan.placement), _used_bytes(plan)
    memory = plan.memory.devices[number]
    return plan.placement.device_layers[number], memory.limit - memory.spare


def _used_bytes(plan: VerifiedPlan) -> int:
    return plan.memory.limit - plan.memory.spare


def what_if_table(
    model: ModelInfo,
    workload: Workload,
    cpu_plan: VerifiedPlan,
    rows: Sequence[WhatIf],
    policy: str = "auto",
    host: Host | None = None,
) -> Table:
    """A card in each row: times of stock llama.cpp at its fastest, and of our best plan. host: a described CPU; None:
    this machine's."""
    cells = [
        (
            row.name,
            format_bytes(row.memory_bytes),
            row.stock.policy,
            format_seconds(row.stock.predicted.ttft_s),
            format_seconds(row.best.predicted.ttft_s),
            _rate(row.stock.predicted),
            _rate(row.best.predicted),
            f"{row.gain:.2f}×",
        )
        for row in rows
    ]
    cpu_name = "this machine's CPU" if host is None else host.name
    ours = "the best plan of a quick search, or llama.cpp's options if no plan is predicted to be faster"
    if policy != "auto":
        ours = f"the plan of policy {policy}, even if slower than stock; the CPU alone if it does not fit"
    footer = [
        *_several_sentences(rows, model.n_layer),
        "prompt: time to the first token with these options, the fastest of stock llama.cpp's --fit, -ngl, -ncmoe, "
        f"these with --no-host, and its expert cache (moe-cache). oallama: the same with {ours}. gain: for the whole "
        f"run. At most {rows[0].stock.memory.fill:.0%} of a card's memory is used. Alone, "
        f"{cpu_name} takes {format_seconds(cpu_plan.predicted.ttft_s)} for the prompt and generates "
        f"{rate_text(cpu_plan.predicted.tpot_s)}.",
    ]
    if step := step_text(workload.step, None):
        footer.append(f"{step} Times are of each request.")
    return table(
        f"{model_title(model)}, {workload.n_prompt} + {workload.n_gen} tokens, beside {cpu_name}: {CLAIM}",
        "card |>memory |options |>prompt |>oallama |>tokens/s |>oallama |>gain",
        cells,
        footer,
    )


def _several_sentences(rows: Sequence[WhatIf], n_layer: int) -> list[str]:
    """The layers of each of several cards (the output counts as one), unless the row shows that."""
    sentences = []
    for row in (row for row in rows if len(row.cards) > 1):
        cards = [_device(row, number, n_layer) for number in range(len(row.cards))]
        ours = ", ".join(
            f"{card['gpu']} {card['n_layers']}{' and slices' if card['has_slices'] else ''}" for card in cards
        )
        stock = ", ".join(f"{card['gpu']} {card['stock_n_layers']}" for card in cards)
        sentences.append(f"{row.name}: layers under oallama's plan: {ours}; under llama.cpp's options: {stock}.")
    return sentences


def _rate(predicted: Predicted) -> str:
    return three_digits(1 / predicted.tpot_s) if predicted.tpot_s > 0 else "-"
