"""Pages in headless Chromium: the html report, the placement page of a server; and the documentation as a site."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))

import placement_records  # noqa: E402
import report_records  # noqa: E402

from oallama.core.history import BlockRuns  # noqa: E402
from oallama.report.html import affinity_html  # noqa: E402
from oallama.report.operators import AffinityReport  # noqa: E402
from oallama.report.placement_page import page_policy, placement_document, placement_html  # noqa: E402
from oallama.serve.placement_server import placement_server  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra browser)")
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens an address; `faults` are errors of its scripts, and what its content security policy refused."""
    contexts = []

    def open_page(url: str, width: int = 1280, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda said: page.faults.append(said.text) if said.type == "error" else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()


def focused(page: Any, what: str) -> str:
    return str(page.evaluate(f"document.activeElement.{what}"))


#
# the html report
#


@pytest.fixture
def report(opened: Open, tmp_path: Path) -> Callable[[AffinityReport], Any]:
    def show(made: AffinityReport) -> Any:
        file = tmp_path / "report.html"
        file.write_text(affinity_html(made), encoding="utf-8")
        page = opened(file.as_uri())
        assert page.faults == []
        return page

    return show


def test_the_map_of_a_report_is_walked_with_the_keyboard(report: Callable[[AffinityReport], Any]) -> None:
    page = report(report_records.dense(n_layer=3))
    marks, tip = page.locator(".mark"), page.locator("#tip")
    assert page.locator(".mark[tabindex='0']").count() == 1
    marks.first.focus()
    assert "blk.0.attn_q.weight" in tip.inner_text() and "CPU µs" in tip.inner_text()
    for key, name in (
        ("ArrowRight", "blk.0.attn_k"), ("ArrowRight", "blk.0.attn_v"), ("ArrowLeft", "blk.0.attn_k"),
        ("ArrowDown", "blk.1.attn_k"), ("ArrowDown", "blk.2.attn_k"), ("ArrowUp", "blk.1.attn_k"),
        ("End", "blk.1.ffn_down"), ("Home", "blk.1.attn_q"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert focused(page, "ariaLabel").startswith(f"{name}.weight: on the "), key
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_the_table_of_a_report_is_sorted_and_filtered(report: Callable[[AffinityReport], Any]) -> None:
    page = report(report_records.dense(n_layer=3))
    rows = page.locator("#operators tbody tr:visible")
    headings = page.locator("#operators thead button").all_inner_texts()

    def column(name: str) -> list[str]:
        return list(rows.locator(f":scope > :nth-child({headings.index(name) + 1})").all_inner_texts())

    def sort_by(name: str) -> list[str]:
        page.locator("#operators thead button").nth(headings.index(name)).click()
        return column(name)

    ascending = list(map(float, sort_by("affinity")))
    assert ascending == sorted(ascending) and len(set(ascending)) > 2
    assert list(map(float, sort_by("affinity"))) == ascending[::-1]
    assert sort_by("operator")[0] == "blk.0.attn_k.weight"
    page.locator("#place").select_option("CPU")
    assert rows.count() == 0, "all of them are on the device"
    page.locator("#place").select_option("")
    page.locator("#filter").fill("blk.1.")
    assert len(column("operator")) == 7 and all("blk.1." in name for name in column("operator"))
    assert page.locator("#shown").inner_text() == "7 of 22 shown"
    page.locator(".mark").first.click()
    assert rows.count() == 22, "going from the map to a row shows it, whatever was filtered"


def test_hostile_names_of_a_report_stay_text(report: Callable[[AffinityReport], Any]) -> None:
    page = report(report_records.hostile())
    assert page.locator("script").count() == page.locator("style").count() == 1
    assert page.locator("img").count() == 0
    assert "<script>alert('x')</script>" in page.locator("#operators").inner_text()
    assert page.evaluate("window.alerted") is None


#
# the placement page
#


STATE = {"status": "ready", "on_device": True, "said": None, "restarts": 0, "pid": 1, "ready_at": 1.0}
RUNS = [
    BlockRuns(block="blk.1.ffn_gate.weight", batch=1, n_runs=9, n_tokens=9, cpu_s=63e-4, wait_s=18e-4, other_s=9e-4)
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    served = placement_records.served()

    def document() -> dict[str, Any]:
        return placement_document(served, STATE, None, RUNS)

    with placement_server(document, lambda: (placement_html(served), page_policy())) as made:
        yield made


def until_it_says(page: Any, state: str) -> None:
    page.locator("[data-live=state]", has_text=re.compile(f"^{state}$")).wait_for(timeout=60_000)


def brightness(colour: str) -> float:
    red, green, blue = (float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_placement_page_shows_what_is_served_and_fits_the_width(
    opened: Open, url: str, width: int, scheme: str
) -> None:
    page = opened(url, width, scheme)
    until_it_says(page, "ready")
    assert page.faults == []
    assert page.locator("#operators tbody tr").count() == 16
    assert page.locator("#blocks tbody tr").all_inner_texts() == ["blk.1.ffn_gate.weight\t1\t9\t1.00\t0.700\t0.200"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground, ink = (
        brightness(page.evaluate(f"getComputedStyle(document.body).{name}")) for name in ("backgroundColor", "color")
    )
    assert abs(ground - ink) > 120 and (ground > ink) == (scheme == "light")


def test_the_placement_page_is_used_with_the_keyboard_and_says_when_the_server_is_gone(opened: Open, url: str) -> None:
    page = opened(url)
    until_it_says(page, "ready")
    for _ in range(60):
        page.keyboard.press("Tab")
        if focused(page, "id") == "filter":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", "where one is can be seen"
    page.keyboard.type("ffn_down")
    visible = page.locator("#operators tbody tr:visible")
    assert visible.count() == 3
    page.keyboard.press("Tab")
    page.keyboard.press("s")  # split
    assert (focused(page, "id"), visible.count()) == ("place", 1)
    page.route("**/placement", lambda route: route.abort())
    until_it_says(page, "no answer")


#
# the documentation
#


def test_every_page_of_the_site_is_built_and_no_link_is_broken(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")}
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"""<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)=["']?https?://""", start)
