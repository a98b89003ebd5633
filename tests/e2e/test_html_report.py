"""The html report in headless Chromium, where there is one: it renders, its script and style pass its own content
security policy, the map answers to the keyboard, the table sorts and filters, hostile names stay text."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
import report_records as records

from oallama.report.html import affinity_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

DRIVER = """
const seen = {};
const mark = document.querySelector(".mark");
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const tip = document.getElementById("tip");
seen.tabStops = document.querySelectorAll(".mark[tabindex='0']").length;
mark.focus();
seen.first = document.activeElement.getAttribute("aria-label");
seen.tip = tip.hidden ? "" : tip.textContent;
press("ArrowRight"); seen.right = document.activeElement.getAttribute("aria-label");
press("ArrowDown"); seen.down = document.activeElement.getAttribute("aria-label");
press("ArrowLeft"); press("ArrowUp"); seen.back = document.activeElement === mark;
press("End"); seen.end = document.activeElement.getAttribute("aria-label");
press("Escape"); seen.dismissed = tip.hidden;
const all = (selector) => Array.from(document.querySelectorAll(selector));
const column = (i) => all("#operators tbody tr:not([hidden])").map((row) => row.cells[i].textContent);
const [name, affinity] = [2, 11];
seen.place = column(0);
const heading = (name) => all("#operators thead button").find((button) => button.textContent === name);
heading("affinity").click(); seen.ascending = column(affinity);
heading("affinity").click(); seen.descending = column(affinity);
heading("operator").click(); seen.names = column(name);
const filter = document.getElementById("filter");
filter.value = "blk.1."; filter.dispatchEvent(new Event("input")); seen.filtered = column(name);
seen.shown = document.getElementById("shown").textContent;
document.querySelectorAll(".mark")[0].click(); seen.unfiltered = column(name).length;
seen.background = getComputedStyle(document.body).backgroundColor;
seen.alerts = window.alerted || 0;
document.body.dataset.seen = JSON.stringify(seen);
"""


def chromium(page, folder, *arguments):
    command = [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def driven(report, folder):
    """What DRIVER saw on the report's page, with the driver's hash added to the policy and nothing else changed."""
    text = affinity_html(report)
    digest = base64.b64encode(hashlib.sha256(DRIVER.encode()).digest()).decode()
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    page = folder / "driven.html"
    page.write_text(text.replace("</body>", f"<script>{DRIVER}</script></body>"), encoding="utf-8")
    dom = chromium(page, folder, "--dump-dom").stdout
    return json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', dom)[1]))


def test_script_and_style_pass_the_pages_own_policy_and_nothing_is_fetched(tmp_path):
    page = tmp_path / "report.html"
    page.write_text(affinity_html(records.moe(n_layer=4)), encoding="utf-8")
    done = chromium(page, tmp_path, "--dump-dom", "--enable-logging=stderr")
    assert "Content Security Policy" not in done.stderr
    assert done.stdout.count("<button") == 12  # the script made the headings sortable


def test_the_map_the_table_and_the_filter_work(tmp_path):
    seen = driven(records.dense(n_layer=3), tmp_path)
    assert seen["tabStops"] == 1
    assert set(seen["place"]) <= {"CPU", "GPU"}
    assert seen["first"].startswith("blk.0.attn_q.weight: on the ")
    assert "blk.0.attn_q.weight" in seen["tip"]
    assert "CPU µs" in seen["tip"]
    assert seen["right"].startswith("blk.0.attn_k.weight")
    assert seen["down"].startswith("blk.1.attn_k.weight")
    assert seen["back"] is True
    assert seen["end"].startswith("blk.0.ffn_down.weight")
    assert seen["dismissed"] is True
    numbers = [float(text) for text in seen["ascending"]]
    assert all(a <= b for a, b in pairwise(numbers))
    assert [float(text) for text in seen["descending"]] == sorted(numbers, reverse=True)
    assert seen["names"][0] == "blk.0.attn_k.weight"
    assert len(seen["filtered"]) == 7
    assert all("blk.1." in name for name in seen["filtered"])
    assert seen["shown"] == "7 of 22 shown"
    assert seen["unfiltered"] == 22  # going from the map to a row shows it, whatever was filtered
    assert seen["background"] == "rgb(245, 246, 248)"  # the stylesheet was applied


def test_hostile_names_run_nothing(tmp_path):
    report = records.hostile()
    page = tmp_path / "hostile.html"
    page.write_text(affinity_html(report), encoding="utf-8")
    dom = chromium(page, tmp_path, "--dump-dom").stdout
    assert dom.count("<script") == 1
    assert dom.count("<style") == 1
    assert "<img" not in dom
    assert "&lt;script&gt;alert('x')&lt;/script&gt;" in dom
    assert driven(report, tmp_path)["alerts"] == 0
