"""scripts/real_card: a machine whose rates are known is found again, and bad files are told in a sentence."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from card_fit import main
from card_model import (
    START,
    CardModel,
    Machine,
    Predictor,
    PublishedRun,
    read_models,
    with_rates,
)

MODELS = """
[dense]
n_layer = 4
n_embd = 1024
n_head = 8
n_head_kv = 2
head_dim = 128
n_ff = 4096
n_vocab = 32000
type = "F16"

[sparse]
n_layer = 4
n_embd = 1024
n_head = 8
n_head_kv = 2
head_dim = 128
n_ff = 512
n_expert = 16
n_expert_used = 2
n_vocab = 32000
type = "Q4_0"
output_type = "Q6_K"

[again]
same_as = "dense"
"""

TRUE = {
    "host.bytes_per_s": 70e9,
    "host.flops_attention_per_s": 30e9,
    "host.flops_by_type.Q6_K": 60e9,
    "card.bytes_per_s": 900e9,
    "card.flops_per_s": 20e12,
    "card.flops_float_per_s": 60e12,
    "card.kernel_s": 4e-6,
    "card.pageable_bytes_per_s": 8e9,
    "first_prompt_s": 0.05,
}


@pytest.fixture
def models(tmp_path: Path) -> dict[str, CardModel]:
    path = tmp_path / "models.toml"
    path.write_text(MODELS)
    return read_models(path)


def runs_on(machine: Machine, models: dict[str, CardModel]) -> list[PublishedRun]:
    """What this machine would measure."""
    asked = [
        PublishedRun(model, context, ngl, ubatch, context - 100, 100, 1.0, 1.0)
        for model in ("dense", "sparse")
        for context in (1024, 4096, 16384)
        for ubatch in (512, 2048)
        for ngl in (0, 2, 4, 5)
    ]
    predictor = Predictor(machine, models, asked)
    return [replace(r, prompt_tps=predictor(r, "prompt"), eval_tps=predictor(r, "eval")) for r in asked]


def write_table(path: Path, runs: list[PublishedRun]) -> Path:
    names = ["Model", "Context", "MVA", "NGL", "Ubatch", "Status", "PromptTokens", "PromptTPS", "EvalTokens", "EvalTPS"]
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        for r in runs:
            table.writerow([r.model, r.context, 1000, r.ngl, r.ubatch, "SUCCESS", r.n_prompt, r.prompt_tps,
                            r.n_gen, r.eval_tps])  # fmt: skip
    return path


def test_fit_and_predict_as_commands(
    tmp_path: Path, models: dict[str, CardModel], capsys: pytest.CaptureFixture[str]
) -> None:
    table = str(write_table(tmp_path / "runs.csv", runs_on(with_rates(START, TRUE), models)))
    toml, machine = str(tmp_path / "models.toml"), str(tmp_path / "machine.json")
    assert main(["fit", table, "--models", toml, "-o", machine, "--every", "2"]) == 0
    assert "16 of 48 rows, 9 rates" in capsys.readouterr().out
    assert main(["predict", table, "--models", toml, "--machine", machine, "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"prompt_tps", "prompt_tps_predicted", "eval_tps", "eval_tps_predicted", "fitted"} <= made["rows"][0].keys()
    assert max(made["median_error"].values()) < 0.02
    assert sum(row["fitted"] for row in made["rows"]) == 16
    assert main(["predict", table, "--models", toml, "--machine", machine]) == 0
    assert "The 32 rows that nothing was fitted to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("dense,1024,1000,2,512,SUCCESS,900,fast,10,5", "line 2: PromptTPS is 'fast', not a number"),
        ("dense,1024,1000,-2,512,SUCCESS,900,5,10,5", "line 2: NGL is -2, which cannot be"),
        ("mamba,1024,1000,2,512,SUCCESS,900,5,10,5", "does not describe mamba"),
        ("dense,1024,1000,2,512,OOM,900,5,10,5", "no run that came to an end"),
    ],
)
def test_a_bad_table_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, sentence: str
) -> None:
    head = "Model,Context,MVA,NGL,Ubatch,Status,PromptTokens,PromptTPS,EvalTokens,EvalTPS"
    (tmp_path / "runs.csv").write_text(f"{head}\n{row}\n")
    (tmp_path / "models.toml").write_text(MODELS)
    table, models, machine = (str(tmp_path / name) for name in ("runs.csv", "models.toml", "m.json"))
    assert main(["fit", table, "--models", models, "-o", machine]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1 and told.startswith("real_card: ")
    assert not Path(machine).exists()
