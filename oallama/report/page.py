"""What our html pages share: templates that escape, and a policy that allows our own style and scripts alone."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from oallama.core.units import MIB, format_bytes
from oallama.report.text import percent, printable

TEMPLATES = Path(__file__).parent / "templates"


def environment() -> Environment:
    """Everything is escaped that is not said to be ours; a name that is missing is an error."""
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


def stylesheet() -> str:
    return script("scale.css") + script("affinity.css")


def script(name: str) -> str:
    """The text of a script or a style of ours."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def content_security_policy(css: str, js: str, connect: str = "") -> str:
    """Only this stylesheet and this script, nothing from anywhere else. connect: what the script may ask, 'self' or
    nothing."""
    asked = f" connect-src {connect};" if connect else ""
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}';{asked} base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
