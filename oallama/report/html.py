"""The affinity report as one self-contained html page: no external resources, no inline styles, all metadata of the
model escaped. The content security policy allows exactly our stylesheet and our script, by hash."""

from __future__ import annotations

from oallama.report import layout, page
from oallama.report.operators import (
    AffinityReport,
    affinity_text,
    compared_table,
    convergence_text,
    devices_table,
    fold,
    measured_text,
    order_text,
    printable_sentence,
    ranked_places,
    run_text,
    saved_text,
    streaming_sentences,
    times_by_device,
    with_plan_in_use,
    zero_text,
)
from oallama.report.slices import weights_on_device
from oallama.report.text import model_title, policy_on, printable, ranges_text


def affinity_html(report: AffinityReport) -> str:
    """The page, with the places of the plan that `oallama run` uses. Deterministic: the same report gives the same
    bytes."""
    asked, report = report, with_plan_in_use(report)
    memory, places = report.plan.memory, report.places
    headings = layout.OPERATOR_HEADINGS
    slices = report.plan.n_on("split") > 0
    return page.rendered(
        "affinity.html.j2",
        ["affinity.js"],
        title=model_title(report.model),
        about=("GPU affinity", "GPU affinity"),
        subtitles=(
            layout.subtitle(report.model, policy_on(report.phase, report.device)),
            measured_text(report),
        ),
        device=printable(report.device),
        fingerprint=f"model {printable(report.model.fingerprint, 16)}",
        tiles=[(*tile, "") for tile in layout.tiles(report)],
        notes=[printable_sentence(note) for note in report.plan.notes],
        map=layout.affinity_map(report.operators, [device.layers for device in report.devices]),
        n_steps=layout.N_STEPS,
        zero=zero_text(report.operators),
        compared=compared_table(asked) if report.baselines else None,
        bar_width=layout.BAR_WIDTH,
        memories=layout.memories(
            printable(report.device), memory, [device.device for device in report.devices if device.memory]
        ),
        devices=(devices_table(report), times_by_device(report)) if report.devices else (),
        weight_segments=layout.weight_segments(*weights_on_device(report.weights)),
        role_lines=[
            (
                line,
                (ranges_text(line.layers) or "-").split(", "),
                saved_text(line.saved_s),
                affinity_text(line),
            )
            for line in fold(report.operators, ranked_places(asked), places)
        ],
        order=order_text(report),
        convergence=convergence_text(report),
        run=run_text(report),
        streaming=streaming_sentences(report),
        slices=slices,
        places=("CPU and GPU", "GPU", "CPU", *(["split"] if slices else [])),
        headings=headings,
        numeric={headings.index("rank"), *range(headings.index("bytes"), len(headings))},
        operators=layout.operator_rows(report.operators, places),
    )
