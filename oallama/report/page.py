"""Base of our html pages: escaping templates, and a content security policy that allows only our style and scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from oallama import __version__
from oallama.core.units import MIB, format_bytes
from oallama.report.text import percent, printable

TEMPLATES = Path(__file__).parent / "templates"


def environment() -> Environment:
    """The template environment: escapes everything that is not marked as ours; a missing name is an error."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    made.filters |= {
        "printable": printable,
        "bytes": format_bytes,
        "mib": lambda n_bytes: f"{n_bytes / MIB:,.2f} MiB",
        "exact": lambda n_bytes: f"{n_bytes:,}",
        "share": percent,
    }
    return made


def rendered(template: str, scripts: Sequence[str], filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """A page with the style of all pages and these scripts. Deterministic: the same values give the same bytes."""
    made = environment()
    made.filters |= filters
    css, js = _sources(scripts)  # ours, not the model's
    policy = policy_of(css, js)
    return made.get_template(template).render(css=css, js=js, policy=policy, version=__version__, **values)


def content_security_policy(scripts: Sequence[str], connect: str) -> str:
    """The policy of a page with these scripts. connect: what they may ask, such as 'self'."""
    return policy_of(*_sources(scripts), connect)


def _sources(scripts: Sequence[str]) -> tuple[Markup, Markup]:
    """The colour scale and the style of all pages, and these scripts."""
    css, js = (
        Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names))
        for names in (("scale.css", "affinity.css"), scripts)
    )
    return css, js


def policy_of(css: str, js: str, connect: str = "") -> str:
    """Only this stylesheet and this script, nothing from anywhere else. connect: what the script may ask, 'self' or
    nothing."""
    asked = f" connect-src {connect};" if connect else ""
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}';{asked} base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
