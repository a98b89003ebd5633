"""scripts/real_card: runs are predicted on a machine whose rates are known, and bad files are told in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from card_fit.errors import document, error
from card_fit.machine import Machine, read_machine
from card_fit.main import chosen, main
from card_fit.models import Model, read_models
from card_fit.predict import Predictor, stock_ngl
from card_fit.tables import Run, read_tables
from experiments.inputs import InputError

ROOT = Path(__file__).resolve().parents[2]
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

MACHINE = ROOT / "docs" / "benchmarks" / "real-card-rtx5090.json"
TRUE = read_machine(MACHINE)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Model]:
    path = tmp_path / "models.toml"
    path.write_text(MODELS)
    return read_models(path)


def runs_on(machine: Machine, models: dict[str, Model]) -> list[Run]:
    """What this machine would measure."""
    asked = [
        Run(model, context, ngl, ubatch, 1000, context - 100, 100, 1.0, 1.0)
        for model in ("dense", "sparse")
        for context in (1024, 4096, 16384)
        for ubatch in (512, 2048)
        for ngl in (0, 2, 4, 5)
    ]
    predictor = Predictor(machine, models, asked)
    return [replace(r, prompt_tps=predictor(r).prompt_tps, eval_tps=predictor(r).eval_tps) for r in asked]


def test_more_layers_on_the_card_are_never_slower(models: dict[str, Model]) -> None:
    runs = runs_on(TRUE, models)
    for i, run in enumerate(runs[1:], start=1):
        if runs[i - 1].ngl < run.ngl:
            assert run.eval_tps > runs[i - 1].eval_tps
            assert run.prompt_tps > 0.98 * runs[i - 1].prompt_tps  # small ones take longer to send than to compute


def test_ngl_counts_the_output_last(models: dict[str, Model]) -> None:
    runs = [Run("dense", 1024, 4, 512, None, 900, 10, 1.0, 1.0)]
    problem = Predictor(TRUE, models, runs).problem("dense")
    of = dict(zip((op.name for op in problem.operators), stock_ngl(problem, 4), strict=True))
    assert of["blk.0.attn_q.weight"] and not of["output.weight"]
    assert stock_ngl(problem, 5)[-1]
    assert sum(stock_ngl(problem, 1)) == 7
    assert not any(stock_ngl(problem, 0))


def test_a_part_of_the_rows_is_chosen(models: dict[str, Model]) -> None:
    runs = runs_on(TRUE, models)
    used = chosen(runs, (1024,), 3)
    assert {(run.context, run.ngl) for run in used} == {(1024, 5), (1024, 0)}
    assert len(used) == 2 * 2 * 2


def test_the_record_has_the_contracts_keys(models: dict[str, Model]) -> None:
    rows = [asdict(run) | {"prompt_tps_predicted": run.prompt_tps * f, "eval_tps_predicted": run.eval_tps / f}
            for run, f in zip(runs_on(TRUE, models)[:3], (1.1, 1.0, 0.8), strict=True)]  # fmt: skip
    made = document(rows)
    assert made["rows"] == rows
    assert made["median_error"] == pytest.approx({"prompt": 0.1, "eval": 1 - 1 / 1.1})
    assert made["worst_error"]["prompt"]["error"] == pytest.approx(-0.2)
    assert made["worst_error"]["eval"] == {"error": pytest.approx(0.25), "model": "dense", "context": 1024, "ngl": 4,
                                           "ubatch": 512}  # fmt: skip
    assert error(rows[0], "prompt") == pytest.approx(0.1)


def test_models_have_the_bytes_of_their_files(models: dict[str, Model]) -> None:
    dense = models["dense"]
    layer_bytes = sum(operator.bytes for operator in dense.operators if operator.layer == 0)
    assert layer_bytes == 2 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096)
    assert models["again"] == dense
    sparse = {op.role: op for op in models["sparse"].operators}
    assert sparse["ffn_up_exps"].bytes == 16 * 1024 * 512 * 18 // 32
    assert sparse["ffn_up_exps"].active_fraction == 1 / 8
    assert (sparse["output"].type, sparse["ffn_gate_inp"].type) == ("Q6_K", "F32")


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("", "has no column Model"),
        ("Model,NGL\nx,1\n", "has no column Context"),
        ("HEAD\n", "no run that came to an end"),
        ("HEAD\ndense,1024,1000,2,512,SUCCESS,900,fast,10,5\n", "line 2: prompt_tps must be a number, not 'fast'"),
        ("HEAD\ndense,1024,1000,2,512,SUCCESS,900,0,10,5\n", "line 2: prompt_tps must be above 0, not 0"),
        ("HEAD\ndense,1024,1000,2,512,SUCCESS,900\n", "line 2: n_gen must be a whole number, not None"),
        ("HEAD\ndense,1024,1000,-2,512,SUCCESS,900,5,10,5\n", "line 2: ngl must be at least 0, not -2"),
        ("HEAD\ndense,1024,1000,nan,512,SUCCESS,900,5,10,5\n", "line 2: ngl must be a whole number, not nan"),
        ("HEAD\nmamba,1024,1000,2,512,SUCCESS,900,5,10,5\n", "does not describe mamba"),
        ("HEAD\ndense,1024,1000,9,512,SUCCESS,900,5,10,5\n", "-ngl 9 is more than dense has layers"),
        ("HEAD\ndense,1024,1000,2,512,OOM,900,5,10,5\n", "no run that came to an end"),
    ],
)
def test_a_bad_table_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, sentence: str
) -> None:
    head = "Model,Context,MVA,NGL,Ubatch,Status,PromptTokens,PromptTPS,EvalTokens,EvalTPS"
    (tmp_path / "runs.csv").write_text(table.replace("HEAD", head))
    (tmp_path / "models.toml").write_text(MODELS)
    line = ["predict", str(tmp_path / "runs.csv"), "--models", str(tmp_path / "models.toml"), "--machine", str(MACHINE)]
    assert main(line) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1 and told.startswith("real_card: ")


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[x", "is no TOML"),
        ("", "describes no model"),
        ("x = 1\n", "x must be an object, not 1"),
        ("[x]\nsame_as = 'y'\n", "the same as 'y', which is not above it"),
        ("[x]\nwidth = 3\n", "x has an unknown key width"),
        (MODELS.replace("n_layer = 4", "n_layer = 0", 1), "dense: n_layer must be above 0, not 0"),
        (MODELS.replace("n_layer = 4", "n_layer = true", 1), "dense: n_layer must be a whole number, not True"),
        (MODELS.replace("n_head_kv = 2", "n_head_kv = 3", 1), "n_head must be a multiple of n_head_kv"),
        (MODELS.replace("n_expert_used = 2", "n_expert_used = 20", 1), "n_expert_used must be some of n_expert"),
        (MODELS.replace('"F16"', '"F17"', 1), "'F17' is not a ggml type"),
    ],
)
def test_bad_models_are_one_sentence(tmp_path: Path, toml: str, sentence: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(toml)
    with pytest.raises(InputError) as caught:
        read_models(path)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": {}, "card": {}, "first_prompt_s": 0}'])
def test_a_bad_machine_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is no machine"):
        read_machine(path)


def test_rates_of_nothing_are_refused(tmp_path: Path) -> None:
    found = json.loads(MACHINE.read_text())
    found["card"]["bytes_per_s"] = 0.0
    (tmp_path / "machine.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match=r"bytes_per_s is 0\.0, not above 0"):
        read_machine(tmp_path / "machine.json")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for read in (read_models, read_machine, lambda path: read_tables([path])):
        with pytest.raises(InputError, match="cannot be read"):
            read(tmp_path / "nothing")


def test_the_recorded_runs_are_predicted_as_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """The cost model has not moved away from the one real card that we have runs of."""
    benchmarks = ROOT / "docs" / "benchmarks"
    recorded = json.loads((benchmarks / "real-card-predicted.json").read_text())
    line = ["predict", str(benchmarks / "real-card-predicted.json"), "--models",
            str(benchmarks / "real-card-models.toml"), "--machine", str(MACHINE)]  # fmt: skip
    assert main([*line, "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert made["median_error"] == pytest.approx(recorded["median_error"], rel=0.1)
    assert sum(row["fitted"] for row in made["rows"]) == 54
    assert main(line) == 0
    assert "The 220 rows that nothing was fitted to" in capsys.readouterr().out


def test_the_script_runs() -> None:
    done = subprocess.run([ROOT / "scripts" / "real_card", "--help"], capture_output=True, text=True, check=True)
    assert "predict" in done.stdout
