"""The affinity report as one self-contained html page: no external resource, no inline style, nothing of the model's
metadata unescaped. The content security policy allows exactly our stylesheet and our script, by hash."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from oallama import __version__
from oallama.core.affinity import AffinityReport
from oallama.core.units import MIB, format_bytes
from oallama.report import colour, layout
from oallama.report.affinity import (
    convergence_text,
    measured_text,
    printable_sentence,
    saved_s,
    saved_text,
    span_text,
    zero_text,
)
from oallama.report.compared import compared, compared_title
from oallama.report.fold import fold
from oallama.report.text import model_title, percent, printable, ranges_text

_TEMPLATES = Path(__file__).parent / "templates"


def affinity_html(report: AffinityReport) -> str:
    """The page. Deterministic: the same report gives the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {
        "printable": printable,
        "ranges": lambda layers: (ranges_text(layers) or "-").split(", "),
        "bytes": format_bytes,
        "saved": lambda line: saved_text(saved_s(line)),
        "exact": lambda n_bytes: f"{n_bytes:,}",
        "span": lambda values: span_text(*(f"{value:.2f}" for value in values)),
    }
    css = colour.stylesheet() + (_TEMPLATES / "affinity.css").read_text(encoding="utf-8")
    js = (_TEMPLATES / "affinity.js").read_text(encoding="utf-8")
    memory = report.memory
    headings = layout.OPERATOR_HEADINGS
    return environment.get_template("affinity.html.j2").render(
        policy=content_security_policy(css, js),
        css=Markup(css),  # ours, not the model's
        js=Markup(js),
        version=__version__,
        title=model_title(report.model),
        subtitle=layout.subtitle(report),
        device=printable(report.device),
        fingerprint=f"model {printable(report.model.fingerprint, 16)}",
        tiles=layout.tiles(report),
        notes=[printable_sentence(note) for note in report.notes],
        map=layout.affinity_map(report.operators),
        scale_marks=layout.scale_marks(report.operators),
        zero=zero_text(report.operators),
        compared=compared(report) if report.baselines else (),
        compared_title=compared_title(report),
        measured=measured_text(report),
        bar_width=layout.BAR_WIDTH,
        memory=memory,
        limit=f"{memory.limit / MIB:,.2f} MiB",
        limit_share=percent(memory.limit, memory.capacity),
        capacity=f"{memory.capacity / MIB:,.2f} MiB",
        memory_segments=layout.memory_segments(memory),
        weight_segments=layout.weight_segments(memory),
        role_lines=fold(report.operators),
        convergence=convergence_text(report),
        headings=headings,
        numeric={headings.index("rank"), *range(headings.index("bytes"), len(headings))},
        name_column=headings.index("operator"),
        affinity_column=headings.index("affinity"),
        operators=layout.operator_rows(report.operators),
    )


def content_security_policy(css: str, js: str) -> str:
    """Only this stylesheet and this script, nothing from anywhere else."""
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
