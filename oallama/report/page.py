"""Base of our html pages: escaping templates, and a content security policy that allows only our style and scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from oallama import __version__
from oallama.core.units import MIB, format_bytes
from oallama.report.text import percent, printable

TEMPLATES = Path(__file__).parent / "templates"


def rendered(template: str, scripts: Sequence[str], **values: Any) -> str:
    """A page with the style of all pages and these scripts; it escapes everything that is not marked as ours.
    Deterministic: the same values give the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {
        "printable": printable,
        "bytes": format_bytes,
        "mib": lambda n_bytes: f"{n_bytes / MIB:,.2f} MiB",
        "exact": lambda n_bytes: f"{n_bytes:,}",
        "share": percent,
    }
    css, js = map(Markup, _sources(scripts))  # ours, not the model's
    policy = content_security_policy(scripts)
    return environment.get_template(template).render(css=css, js=js, policy=policy, version=__version__, **values)


def content_security_policy(scripts: Sequence[str], connect: str = "") -> str:
    """Only the style of all pages and these scripts, nothing from anywhere else. connect: what the scripts may ask,
    'self' or nothing."""
    style, script = map(_hash, _sources(scripts))
    asked = f" connect-src {connect};" if connect else ""
    return f"default-src 'none'; style-src '{style}'; script-src '{script}';{asked} base-uri 'none'; form-action 'none'"


def _sources(scripts: Sequence[str]) -> tuple[str, str]:
    """The style of all pages, and these scripts."""
    css, js = (
        "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names)
        for names in (("scale.css", "affinity.css"), scripts)
    )
    return css, js


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
