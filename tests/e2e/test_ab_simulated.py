"""scripts/ab --simulate: what the policies of a cell are predicted to do, from a recorded profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from ab.main import main
from make_model import write_shape
from model_shapes import KNOWN

PROFILE = Path(__file__).resolve().parents[1] / "golden" / "corpus" / "profile-emulated-rtx3060.json"
MATRIX = """
name = "trial"
[options]
arms = ["stock-fit", "layers", "hetegen", "fiddler"]
device = "emulated:rtx3060-12,scale=7.71/12.3"
threads = 1
[[models]]
name = "1b"
path = "{path}"
[[caps]]
gpu_weights = "50%"
[[caps]]
gpu_weights = "75%"
[[workloads]]
pg = [64, 16]
"""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that has no weights: nothing is loaded but its header."""
    folder = tmp_path_factory.mktemp("matrix")
    path = write_shape(folder / "1b.gguf", KNOWN["llama-1b"], "Q4_0", empty=True)
    file = folder / "trial.toml"
    file.write_text(MATRIX.format(path=path))
    return file


def test_every_policy_of_a_cell_is_predicted(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = matrix.with_name("predicted.json")

    def simulate(only: str) -> list[str]:
        arguments = ["--only", only, "--simulate", str(file), "--profile", str(PROFILE)]
        assert main([str(matrix), "--out", str(matrix.parent / "out"), *arguments]) == 0
        return [cell["cap"] for cell in json.loads(file.read_text())["cells"]]

    assert simulate("75") == ["75%"]
    assert simulate("50") == ["50%", "75%"]  # what was there stays, in the order of the matrix
    layers, hetegen, fiddler = json.loads(file.read_text())["cells"][0]["arms"]
    assert (layers["arm"], hetegen["arm"], fiddler["arm"]) == ("layers", "hetegen", "fiddler")
    assert layers["total_s"] == pytest.approx(layers["ttft_s"] + 16 * layers["tpot_s"])
    assert layers["weights"]["cg"] == 0 < hetegen["weights"]["cg"]
    for arm in (layers, hetegen):
        assert sum(arm["weights"].values()) == pytest.approx(1)
        assert 0.4 < arm["weights"]["gg"] <= 0.5
        assert 0 < max(arm["busy"]["token"].values()) <= 1
    assert layers["places"] != hetegen["places"]
    assert "for models with experts" in fiddler["error"]
    assert not (matrix.parent / "out" / "results.json").exists()
