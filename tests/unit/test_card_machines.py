"""scripts/real_card machines: rows of tables as runs, data sheets as machines, and the page as its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from card_fit import MODELS, PAGE, PICTURE, RESULTS, SHEETS, Panels, excess_bytes, page
from card_model import DataSheet, PublishedRun, by_data_sheet, read_models
from shared import read_toml, record


def test_the_page_and_the_picture_are_what_the_results_give() -> None:
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(document)
    picture = PICTURE.read_text(encoding="utf-8")
    assert picture == Panels("Measured and predicted tokens per second of each machine", document).svg()
    assert len(list(ElementTree.fromstring(picture).iter())) > 500


def test_every_machine_has_a_data_sheet_and_every_row_its_report() -> None:
    sheets = {key: record(DataSheet, each, key) for key, each in read_toml(SHEETS).items()}
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert list(document) == list(sheets) and len(sheets) == 26
    for row in document.values():
        assert all(point["source"] and point["measured"] > 0 < point["predicted"] for point in row["points"])


def of(machine: str, phase: str, **asked: int) -> list[dict[str, Any]]:
    """Rows of a machine, as the page's results have them."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))[machine]["points"]
    return [row for row in rows if row["phase"] == phase and all(row.get(key, 0) == asked[key] for key in asked)]


def sentence(machine: str) -> str:
    """What the page says of a machine's rows under "What is still wrong"."""
    text = PAGE.read_text(encoding="utf-8").partition("### What is still wrong")[2]
    return " ".join(text[text.index(f"**{machine}") :].partition("\n- **")[0].split())


def test_tokens_of_m13_contradict_each_other() -> None:
    [more], [fewer] = of("M13", "eval", ncmoe=44), of("M13", "eval", ncmoe=36)
    fast, slow = more["measured"], fewer["measured"]  # the slow one has more on the card
    least = (fast - slow) / (fast + slow)  # error at both of the best prediction that is equal for both
    assert f"gave {fast:.1f} tokens/s" in sentence("M13") and f"the card, {slow:.1f}" in sentence("M13")
    assert f"{100 * least:.0f} % off or more" in sentence("M13")
    assert sum(row.get("flag") == "noisy" for row in of("M13", "eval")) == 5 and "five of its ten" in sentence("M13")


def test_no_rate_of_m40_s_card_gives_its_layers_and_its_output() -> None:
    token_ms = {row.get("ngl", 0): 1e3 / row["measured"] for row in of("M40", "eval")}
    layers = [(token_ms[4] - token_ms[1]) / 3, (token_ms[8] - token_ms[4]) / 4]
    assert f"{layers[0]:.0f} and {layers[1]:.0f} ms" in sentence("M40")
    assert f"gains {token_ms[0] - token_ms[1]:.0f} ms" in sentence("M40")
    [first] = [row for row in of("M40", "eval") if not row.get("ngl")]
    assert f"{100 * (first['predicted'] / first['measured'] - 1):.0f} % too fast" in sentence("M40")
    operators = read_models(MODELS)["Qwen3-4B Q4_K_M"].operators
    a_layer, output = (sum(o.bytes for o in operators if o.layer == layer) for layer in (8, None))
    assert 5 <= output / a_layer < 6 and "five times" in sentence("M40")


def test_rows_of_m09_overflow_its_card() -> None:
    models, sheet = read_models(MODELS), record(DataSheet, read_toml(SHEETS)["M09"], "M09")
    over = {}
    for row in of("M09", "prompt"):
        served = "context" in row
        run = PublishedRun(row["model"], row.get("context", 0), 99, 512, row["n_prompt"], 128, 1, 1,
                           ncmoe=row["ncmoe"], today=True, after_prompt=served, kv=row.get("kv", "f16"))  # fmt: skip
        over[row["ncmoe"], served] = excess_bytes(run, models, by_data_sheet(sheet)) / 2**30
    assert {key for key, gib in over.items() if gib > 0} == {(8, False), (8, True), (12, True)}
    assert f"{over[8, False]:.1f} and {over[8, True]:.1f} GiB" in sentence("M09")
    assert f"`-ncmoe 12` {over[12, True]:.1f}" in sentence("M09")
    measured = [
        of("M09", "prompt", ncmoe=n, context=c)[0]["measured"] for n, c in ((8, 0), (16, 0), (12, 32768), (16, 32768))
    ]
    assert measured[0] < measured[1] and measured[2] < measured[3]
    assert "{:.0f} tokens/s, not {:.0f}; {:.0f}, not {:.0f}".format(*measured) in sentence("M09")
