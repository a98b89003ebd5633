"""scripts/real_card machines: rows of tables as runs, data sheets as machines, and the page as its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from card_machines import (
    PAGE,
    PICTURE,
    RESULTS,
    SHEETS,
    Panels,
    page,
)
from card_model import DataSheet
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
