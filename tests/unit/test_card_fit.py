"""scripts/real_card: a machine whose rates are known is found again, and bad files are told in a sentence."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from card_fit import chosen, document, error, fit, main
from card_model import (
    START,
    CardModel,
    FittedMachine,
    Predictor,
    PublishedRun,
    rates,
    read_machine,
    read_models,
    read_tables,
    with_rates,
    write_machine,
)
from shared import InputError

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


def runs_on(machine: FittedMachine, models: dict[str, CardModel]) -> list[PublishedRun]:
    """What this machine would measure."""
    asked = [
        PublishedRun(model, context, ngl, ubatch, 1000, context - 100, 100, 1.0, 1.0)
        for model in ("dense", "sparse")
        for context in (1024, 4096, 16384)
        for ubatch in (512, 2048)
        for ngl in (0, 2, 4, 5)
    ]
    predictor = Predictor(machine, models, asked)
    return [replace(r, prompt_tps=predictor(r).prompt_tps, eval_tps=predictor(r).eval_tps) for r in asked]


def write_table(path: Path, runs: list[PublishedRun]) -> Path:
    names = ["Model", "Context", "MVA", "NGL", "Ubatch", "Status", "PromptTokens", "PromptTPS", "EvalTokens", "EvalTPS"]
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        for r in runs:
            table.writerow([r.model, r.context, r.budget_mb, r.ngl, r.ubatch, "SUCCESS", r.n_prompt, r.prompt_tps,
                            r.n_gen, r.eval_tps])  # fmt: skip
    return path


def test_a_machine_is_found_again_from_its_runs(models: dict[str, CardModel]) -> None:
    machine = with_rates(START, TRUE)
    runs = runs_on(machine, models)
    found = fit([run for run in runs if run.context != 4096], models)
    assert rates(found) == pytest.approx(TRUE, rel=0.1)
    predictor = Predictor(found, models, runs)
    assert all(predictor(run).eval_tps == pytest.approx(run.eval_tps, rel=0.02) for run in runs)
    assert all(predictor(run).prompt_tps == pytest.approx(run.prompt_tps, rel=0.02) for run in runs)


def test_runs_far_off_do_not_lead_it_astray(models: dict[str, CardModel]) -> None:
    machine = with_rates(START, TRUE)
    runs = runs_on(machine, models)
    odd = [replace(run, prompt_tps=run.prompt_tps / 3) if i % 12 == 5 else run for i, run in enumerate(runs)]
    found = fit(odd, models)
    assert rates(found)["card.pageable_bytes_per_s"] == pytest.approx(8e9, rel=0.1)
    assert rates(found)["host.bytes_per_s"] == pytest.approx(70e9, rel=0.1)


def test_more_layers_on_the_card_are_never_slower(models: dict[str, CardModel]) -> None:
    runs = runs_on(with_rates(START, TRUE), models)
    for i, run in enumerate(runs[1:], start=1):
        if runs[i - 1].ngl < run.ngl:
            assert run.eval_tps > runs[i - 1].eval_tps
            assert run.prompt_tps > 0.98 * runs[i - 1].prompt_tps  # small ones take longer to send than to compute


def there(models: dict[str, CardModel], name: str, **asked: Any) -> set[str]:
    run = replace(PublishedRun(name, 1024, 99, 512, None, 900, 10, 1.0, 1.0), **asked)
    return {op.name for op in models[name].operators if run.on_device(op, models[name].info.n_layer)}


def test_ngl_counts_the_output_last_and_today_first(models: dict[str, CardModel]) -> None:
    assert "blk.0.attn_q.weight" in there(models, "dense", ngl=4)
    assert "output.weight" not in there(models, "dense", ngl=4)
    assert "output.weight" in there(models, "dense", ngl=5)
    assert len(there(models, "dense", ngl=1)) == 7
    assert not there(models, "dense", ngl=0)
    assert there(models, "dense", ngl=1, today=True) == {"output.weight"}
    assert "blk.0.attn_q.weight" not in there(models, "dense", ngl=4, today=True)


def test_experts_and_ffns_of_the_first_layers_may_stay_on_the_host(models: dict[str, CardModel]) -> None:
    everything = there(models, "sparse", today=True)
    left = everything - there(models, "sparse", ncmoe=1, today=True)
    assert left == {f"blk.0.ffn_{role}_exps.weight" for role in ("gate", "up", "down")}
    assert len(there(models, "dense", today=True) - there(models, "dense", ncffn=2, today=True)) == 6


def test_of_experts_the_used_ones_are_copied_today(models: dict[str, CardModel]) -> None:
    run = PublishedRun("sparse", 1024, 0, 512, None, 512, 10, 1.0, 1.0)
    predictor = Predictor(START, models, [run])
    assert predictor(replace(run, today=True)).prompt_tps > predictor(run).prompt_tps


def test_a_part_of_the_rows_is_chosen(models: dict[str, CardModel]) -> None:
    runs = runs_on(START, models)
    used = chosen(runs, (1024,), 3)
    assert {(run.context, run.ngl) for run in used} == {(1024, 5), (1024, 0)}
    assert len(used) == 2 * 2 * 2


def test_the_record_has_the_contracts_keys(models: dict[str, CardModel]) -> None:
    rows = [asdict(run) | {"prompt_tps_predicted": run.prompt_tps * f, "eval_tps_predicted": run.eval_tps / f}
            for run, f in zip(runs_on(START, models)[:3], (1.1, 1.0, 0.8), strict=True)]  # fmt: skip
    made = document(rows)
    assert made["rows"] == rows
    assert made["median_error"] == pytest.approx({"prompt": 0.1, "eval": 1 - 1 / 1.1})
    assert made["worst_error"]["prompt"]["error"] == pytest.approx(-0.2)
    assert made["worst_error"]["eval"] == {"error": pytest.approx(0.25), "model": "dense", "context": 1024, "ngl": 4,
                                           "ubatch": 512}  # fmt: skip
    assert error(rows[0], "prompt") == pytest.approx(0.1)


def test_models_have_the_bytes_of_their_files(models: dict[str, CardModel]) -> None:
    dense = models["dense"]
    layer_bytes = sum(operator.bytes for operator in dense.operators if operator.layer == 0)
    assert layer_bytes == 2 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096)
    assert models["again"].operators == dense.operators
    sparse = {op.role: op for op in models["sparse"].operators}
    assert sparse["ffn_up_exps"].bytes == 16 * 1024 * 512 * 18 // 32
    assert sparse["ffn_up_exps"].active_fraction == 1 / 8
    assert (sparse["output"].type, sparse["ffn_gate_inp"].type) == ("Q6_K", "F32")


def test_a_machine_is_written_and_read(tmp_path: Path) -> None:
    machine = with_rates(START, TRUE)
    write_machine(machine, tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == machine


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
    ("table", "sentence"),
    [
        ("", "has no column Model"),
        ("Model,NGL\nx,1\n", "has no column Context"),
        ("HEAD\n", "no run that came to an end"),
        ("HEAD\ndense,1024,1000,2,512,SUCCESS,900,fast,10,5\n", "line 2: PromptTPS is 'fast', not a number"),
        ("HEAD\ndense,1024,1000,2,512,SUCCESS,900,0,10,5\n", "line 2: PromptTPS is 0, which cannot be"),
        ("HEAD\ndense,1024,1000,2,512,SUCCESS,900\n", "line 2: EvalTokens is None, not a number"),
        ("HEAD\ndense,1024,1000,-2,512,SUCCESS,900,5,10,5\n", "line 2: NGL is -2, which cannot be"),
        ("HEAD\ndense,1024,1000,nan,512,SUCCESS,900,5,10,5\n", "line 2: NGL is nan, which cannot be"),
        ("HEAD\nmamba,1024,1000,2,512,SUCCESS,900,5,10,5\n", "does not describe mamba"),
        ("HEAD\ndense,1024,1000,9,512,SUCCESS,900,5,10,5\n", "-ngl 9 is more than dense has layers"),
        ("HEAD\ndense,1024,1000,2,512,OOM,900,5,10,5\n", "no run that came to an end"),
        ("HEAD\ndense,1024,1000,2,512,SUCCESS,900,5,10,5\n", "1 rows are too few"),
    ],
)
def test_a_bad_table_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, sentence: str
) -> None:
    head = "Model,Context,MVA,NGL,Ubatch,Status,PromptTokens,PromptTPS,EvalTokens,EvalTPS"
    (tmp_path / "runs.csv").write_text(table.replace("HEAD", head))
    (tmp_path / "models.toml").write_text(MODELS)
    line = [
        "fit",
        str(tmp_path / "runs.csv"),
        "--models",
        str(tmp_path / "models.toml"),
        "-o",
        str(tmp_path / "m.json"),
    ]
    assert main(line) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1 and told.startswith("real_card: ")
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[x", "is not TOML"),
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
    write_machine(with_rates(START, {"card.bytes_per_s": 0.0}), tmp_path / "machine.json")
    with pytest.raises(InputError, match=r"bytes_per_s is 0\.0, not above 0"):
        read_machine(tmp_path / "machine.json")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for read in (read_models, read_machine, lambda path: read_tables([path])):
        with pytest.raises(InputError, match="cannot be read"):
            read(tmp_path / "nothing")


def test_an_interrupt_is_told_and_leaves_nothing(
    tmp_path: Path,
    models: dict[str, CardModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: object) -> FittedMachine:
        raise KeyboardInterrupt

    monkeypatch.setattr("card_fit.fit", stop)
    table = str(write_table(tmp_path / "runs.csv", runs_on(START, models)))
    assert main(["fit", table, "--models", str(tmp_path / "models.toml"), "-o", str(tmp_path / "m.json")]) == 130
    assert capsys.readouterr().err == "real_card: interrupted; nothing was written\n"
    assert not (tmp_path / "m.json").exists()


def test_the_script_runs() -> None:
    done = subprocess.run([ROOT / "scripts" / "real_card", "--help"], capture_output=True, text=True, check=True)
    assert "machines" in done.stdout
