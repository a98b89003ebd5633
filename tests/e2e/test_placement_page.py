"""The placement page in a browser: headless Chromium, at two widths, light and dark, and with the keyboard alone.

OALLAMA_PICTURES=FOLDER: also writes what it looked like there.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra browser)")

import placement_records as records  # noqa: E402

from oallama.core.history import BlockRuns  # noqa: E402
from oallama.report.placement import page_policy, placement_document, placement_html  # noqa: E402
from oallama.serve.placement import placement_server  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 60_000
WIDTHS = {"wide": (1280, 900), "narrow": (390, 844)}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        made = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


STATE = {"phase": "ready", "on_device": True, "said": None, "restarts": 0, "pid": 1, "ready_at": 1.0}
RUNS = [
    BlockRuns(block="blk.1.ffn_gate.weight", batch=1, n_runs=9, n_tokens=9, cpu_s=63e-4, wait_s=18e-4, other_s=9e-4)
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    served = records.served()

    def document() -> dict[str, Any]:
        return placement_document(served, STATE, None, RUNS)

    with placement_server(document, lambda: (placement_html(served), page_policy())) as made:
        yield made


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def page(browser: Any, url: str, width: str, scheme: str) -> Iterator[Any]:
    x, y = WIDTHS[width]
    context = browser.new_context(viewport={"width": x, "height": y}, color_scheme=scheme)
    made = context.new_page()
    made.faults = []
    made.on("pageerror", lambda error: made.faults.append(str(error)))
    made.on("console", lambda said: made.faults.append(said.text) if said.type == "error" else None)
    made.goto(url)
    state(made).to_have_text("ready", timeout=PATIENCE_MS)
    yield made
    context.close()


def test_it_shows_what_is_served_and_fits_the_width(page: Any, width: str, scheme: str) -> None:
    assert page.faults == []  # no error of a script, nothing that the policy of the page refused
    assert page.locator("#operators tbody tr").count() == 16
    assert page.locator("#blocks tbody tr").all_inner_texts() == ["blk.1.ffn_gate.weight\t1\t9\t1.00\t0.700\t0.200"]
    x = WIDTHS[width][0]
    assert page.evaluate("document.documentElement.scrollWidth") <= x
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (brightness(ground) > brightness(ink)) == (scheme == "light")
    assert abs(brightness(ground) - brightness(ink)) > 120
    if folder := os.environ.get("OALLAMA_PICTURES"):
        page.screenshot(path=str(Path(folder) / f"placement-{width}-{scheme}.png"), full_page=width == "wide")


def state(page: Any) -> Any:
    """What the page says of the server, to be waited for."""
    return playwright.expect(page.locator("[data-live=state]"))


def brightness(colour: str) -> float:
    red, green, blue = (float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_keyboard_reaches_everything_and_filters(page: Any) -> None:
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if page.evaluate("document.activeElement.id") == "filter":
            break
    assert "filter" in reached
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # where one is can be seen
    page.keyboard.type("ffn_down")
    visible = page.locator("#operators tbody tr:visible")
    assert visible.count() == 3
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "place"
    page.keyboard.press("b")  # both
    assert page.locator("#operators tbody tr:visible").count() == 1


def test_it_says_when_the_server_is_gone(page: Any) -> None:
    page.route("**/placement", lambda route: route.abort())
    state(page).to_have_text("no answer", timeout=PATIENCE_MS)
