"""Programs of developers: scripts/make_model.py writes the shape asked for, shapes that are known are those of their
models; scripts/real_card finds a machine again, and says what is wrong with a table."""

import csv
import json
import math
import sys
from dataclasses import replace
from importlib.metadata import distribution, distributions
from pathlib import Path

import gguf_factory  # noqa: F401 - puts scripts on the path
import make_model
import pytest
from card_fit import START, Predictor, PublishedRun, main, read_models, with_rates
from cuda_build.pack import install_entry_points
from gpu_card import MIB, PAUSE_EVERY, REQUESTS, grown
from model_shapes import KNOWN
from processes import ROOT

from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators


def test_make_model_writes_the_shape_asked_for(tmp_path):
    path = tmp_path / "model.gguf"
    assert make_model.main(["--like", "moe-mini", "--layers", "3", "--type", "Q8_0", "-o", str(path)]) == 0
    shape, info = KNOWN["moe-mini"], model_info(read_gguf(path))
    assert (info.n_layer, info.n_embd, info.n_ff) == (3, shape.n_embd, shape.n_ff)
    assert (info.n_head, info.n_head_kv, info.n_vocab, info.n_ctx_train) == (
        shape.n_head, shape.n_head_kv, shape.n_vocab, shape.n_ctx
    )  # fmt: skip
    assert {operator.type for operator in operators(read_gguf(path))} == {"Q8_0", "F32"}, "the router is F32"
    for n_layer in ("0", "-1"):
        with pytest.raises(SystemExit):
            make_model.main(["--like", "moe-mini", "--layers", n_layer, "-o", str(tmp_path / "none.gguf")])
        assert not (tmp_path / "none.gguf").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_a_pack_finds_what_an_installation_finds(tmp_path):
    install_entry_points(tmp_path, ROOT)
    (found,) = distributions(name="oallama", path=[str(tmp_path / "site")])
    installed = {(entry.group, entry.name, entry.value) for entry in distribution("oallama").entry_points}
    in_pack = {(entry.group, entry.name, entry.value) for entry in found.entry_points}
    assert in_pack and in_pack == {entry for entry in installed if entry[0] != "console_scripts"}


@pytest.mark.parametrize(("lost_each", "is_told"), [(0, False), (MIB // 8, False), (MIB, True)])
def test_memory_that_a_card_does_not_get_back_is_told(lost_each, is_told):
    """The first requests take what the others use again."""
    rows = [{"free_bytes": 2000 * MIB - min(i, 9) * 50 * MIB - i * lost_each} for i in range(REQUESTS)]
    assert bool(grown(rows)) == is_told
    assert (
        not is_told or grown(rows) == f"{REQUESTS - 3 * PAUSE_EVERY} MiB less of the card's memory is free at the end"
    )


@pytest.mark.parametrize(
    ("name", "published"),  # as the models' cards state it
    [
        ("llama3-8b", 8_030_261_248),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_630_071_296),
        ("qwen1.5-14b", 14_167_290_880),
        ("qwq-32b", 32_763_876_352),
        ("qwen2-57b-a14b", 57_408_658_944),
        ("phi3.5-moe", 41_873_153_344),
        ("minicpm3-4b", 4_261_902_848),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("glm-4.5-air", 106_852_251_264),  # without the layer that predicts the token after next
        ("gemma-3-27b", 27_009_346_304 - 64 * 5376),  # without vision, and the 64 tokens that its GGUFs leave out
        ("llama-3.3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gemma-3-4b", 3_880_263_168 - 64 * 2560),
        ("gemma-3-12b", 11_766_034_176 - 64 * 3840),
        ("phi-4", 14_659_507_200),
        ("mistral-7b", 7_248_023_552),
        ("mistral-nemo", 12_247_782_400),
    ],
)
def test_known_shapes_have_the_parameters_of_their_models(name, published):
    """Those that training found: without factors of RoPE, which follow from the architecture."""
    shape = KNOWN[name]
    tensors = {**shape.matrices, **shape.vectors, **{f"{role}.bias": ne for role, ne in shape.biases.items()}}
    sizes = {name: ne if isinstance(ne, int) else math.prod(ne) for name, ne in tensors.items()}
    experts = sum(n for name, n in sizes.items() if name.startswith(("ffn_", "exp_probs_b")) and name != "ffn_norm")
    dense = sum(map(math.prod, shape.dense.values()))
    outside = shape.n_embd * shape.n_vocab * (1 if shape.tied else 2) + shape.n_embd + sum(shape.last_biases.values())
    assert shape.n_layer * sum(sizes.values()) + shape.n_dense * (dense - experts) + outside == published


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
"""
TRUE = {
    "host.bytes_per_s": 70e9, "host.flops_attention_per_s": 30e9, "host.flops_by_type.Q6_K": 60e9,
    "card.bytes_per_s": 900e9, "card.flops_per_s": 20e12, "card.flops_float_per_s": 60e12, "card.kernel_s": 4e-6,
    "card.pageable_bytes_per_s": 8e9, "first_prompt_s": 0.05,
}  # fmt: skip
HEAD = "Model,Context,MVA,NGL,Ubatch,Status,PromptTokens,PromptTPS,EvalTokens,EvalTPS"


def test_real_card_fits_predicts_and_says_what_is_wrong_with_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("models.toml").write_text(MODELS)
    models = read_models(Path("models.toml"))
    asked = [
        PublishedRun(model, context, ngl, ubatch, context - 100, 100, 1.0, 1.0)
        for model in ("dense", "sparse")
        for context in (1024, 16384)
        for ubatch in (512, 2048)
        for ngl in (0, 2, 4, 5)
    ]
    predictor = Predictor(with_rates(START, TRUE), models, asked)
    with Path("runs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(HEAD.split(","))
        for run in asked:
            r = replace(run, prompt_tps=predictor(run, "prompt"), eval_tps=predictor(run, "eval"))
            table.writerow([r.model, r.context, 1000, r.ngl, r.ubatch, "SUCCESS", r.n_prompt, r.prompt_tps,
                            r.n_gen, r.eval_tps])  # fmt: skip
    assert main(["fit", "runs.csv", "--models", "models.toml", "-o", "machine.json"]) == 0
    assert "16 of 32 rows, 9 rates" in capsys.readouterr().out
    predict = ["predict", "runs.csv", "--models", "models.toml", "--machine", "machine.json"]
    assert main([*predict, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert {"prompt_tps", "prompt_tps_predicted", "eval_tps", "eval_tps_predicted", "fitted"} <= made["rows"][0].keys()
    assert max(made["median_error"].values()) < 0.02
    assert sum(row["fitted"] for row in made["rows"]) == 16
    assert main(predict) == 0
    assert "The 16 rows not used for the fit" in capsys.readouterr().out
    Path("runs.csv").write_text(f"{HEAD}\nmamba,1024,1000,2,512,SUCCESS,900,5,10,5\n")
    assert main(["fit", "runs.csv", "--models", "models.toml", "-o", "other.json"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("real_card: ") and "does not describe mamba" in told and told.count("\n") == 1
    a_run = f"{HEAD}\ndense,1024,1000,2,512,SUCCESS,900,5,10,5\n"
    for table, sizes, said in (
        (a_run.replace("900,5", "900,0"), MODELS, "runs.csv, line 2 is not a run: a number is out of range"),
        (a_run.replace("900,5", "900,nan"), MODELS, "a number is out of range"),
        (f"{HEAD}\n", MODELS, "no completed run"),
        (a_run.replace("Context", "Ctx"), MODELS, "runs.csv has no column Context"),
        (a_run, MODELS.replace("Q6_K", "Q6"), "sparse is not described: 'Q6' is not a ggml type"),
        (a_run, MODELS.replace("n_head_kv = 2", "n_head_kv = 3"), "multiple of n_head_kv"),
        (a_run, MODELS.replace("n_expert_used = 2\n", ""), "n_expert_used must be from 1 to n_expert"),
    ):
        Path("runs.csv").write_text(table)
        Path("models.toml").write_text(sizes)
        assert main(predict) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
