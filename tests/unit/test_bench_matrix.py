"""`oallama bench --matrix`: what a file asks for, what is kept of it, and what is shown."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import PATIENCE_S, must_end, until

from oallama.cli.bench import command
from oallama.cli.main import exit_code
from oallama_contrib.matrix import command as bench_matrix
from oallama_contrib.matrix.cells import Cell, Outcome, against_stock, read_matrix
from oallama_contrib.matrix.command import flags_of

TEXT = """
about = "two models"
arms = ["stock-fit", "oato"]
device = "rpc-worker:1:1"
n-prompt = 0
n-gen = 0
[[setting]]
model = ["models/a.gguf", "models/b.gguf"]
pg = ["64,16", "256,16"]
no-tuned = true
[[setting]]
model = "models/a.gguf"
vram = "3GiB"
arms = ["stock-ngl", "auto"]
pg = "64,16"
"""


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def cells_of(path):
    return read_matrix(path, flags_of(command))[1]


def row(arm, ms, **changes):
    return {
        "arm": arm, "n_prompt": 64, "n_gen": 16, "n_depth": 0, "samples_ns": [round(ms * 1e6) + i for i in range(6)],
        "problems": [], "same_as": None, "ttft_s": 0.1, "tpot_s": 0.01, "ttft_ratio_to_first": 1.5,
        "tpot_ratio_to_first": None, "predicted": {"ttft_s": 0.1, "tpot_s": 0.01}, "device_bytes": 2**20,
        "gpu_info": "a card", "cpu_info": "a CPU", **changes,
    }  # fmt: skip


def test_a_list_is_a_comparison_for_each_value(matrix):
    cells = cells_of(matrix)
    both = "arms stock-fit,oato"
    assert [cell.name for cell in cells] == [
        *(f"model {name}, {both}, pg {pg},16, no-tuned True" for name in "ab" for pg in (64, 256)),
        "model a, arms stock-ngl,auto, pg 64,16, vram 3GiB",
    ]
    words = " ".join(cells[4].command)
    assert "--arms stock-ngl,auto" in words
    assert "--no-tuned" in cells[0].command and "--no-tuned" not in words


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("about", "abuot"), "unknown key abuot"),
        (("[[setting]]", "[setting]"), "is not TOML"),
        (('"256,16"', '"256;16"'), "not a prompt and a generation"),
        (('"3GiB"', '"three"'), "three"),
        (("pg = [", "pg = [["), "is not TOML"),
        (('pg = ["64,16", "256,16"]', "pg = []"), "neither a value nor a list"),
        (('["models/a.gguf", "models/b.gguf"]', '["a.gguf", "a.gguf"]'), "the same comparison twice"),
        (('model = ["models/a.gguf", "models/b.gguf"]', ""), "names no model"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(matrix, capsys, changed, said):
    matrix.write_text(TEXT.replace(*changed), encoding="utf-8")
    assert exit_code(["bench", "--matrix", "m.toml"]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not Path("m.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m.toml", "--vram", "1GiB"], "omit --vram"),
        (["m.toml", "-o", "x.md"], "a matrix result is JSON"),
        (["none.toml"], "cannot read none.toml"),
    ],
)
def test_options_of_one_comparison_do_not_go_with_it(matrix, capsys, words, said):
    assert exit_code(["bench", "--matrix", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_was_measured_is_kept_and_not_measured_again(matrix, monkeypatch, capsys):
    asked = []

    def measured(cell):
        asked.append(cell.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        if len(asked) == 2:
            return Outcome(cell.command, 1.0, error="the worker is gone")
        return Outcome(cell.command, 1.0, (row("stock-fit", 20), row("oato", 10)))

    monkeypatch.setattr(bench_matrix, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        exit_code(["bench", "--matrix", "m.toml"])
    out, told = capsys.readouterr()
    out = " ".join(out.split())  # lines are wrapped
    assert "3 are not measured yet" in out and "the worker is gone" in out and "2.00 (2.00..2.00)" in out
    assert [line for line in told.splitlines() if line.startswith("[")] == []  # no terminal, no progress
    first = asked[0]
    assert exit_code(["bench", "--matrix", "m.toml"]) == 0
    assert asked.count(first) == 1 and len(asked) == 3 + 4
    document = json.loads(Path("m.json").read_text(encoding="utf-8"))
    assert [tuple(each["command"]) for each in document["cells"]] == [cell.command for cell in cells_of(matrix)]
    assert Path("m.svg").read_text(encoding="utf-8").startswith("<svg")
    capsys.readouterr()
    assert exit_code(["bench", "--matrix", "m.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document


def test_a_matrix_is_measured_by_one_process_at_a_time(matrix, monkeypatch, capsys):
    statuses = []

    def measured(cell):
        statuses.append(exit_code(["bench", "--matrix", "m.toml"]))
        return Outcome(cell.command, 1.0, error="x")

    monkeypatch.setattr(bench_matrix, "measured", measured)
    assert exit_code(["bench", "--matrix", "m.toml"]) == 1
    assert set(statuses) == {2} and "another process is measuring m.toml" in capsys.readouterr().err


def test_a_result_of_something_else_is_left_alone(matrix, capsys):
    good = {"version": 1, "about": "", "cells": []}
    other = {**good, "cells": [{"command": ["--model", "z.gguf"], "seconds": 1.0, "rows": [], "error": ""}]}
    texts = {
        json.dumps(good)[:-3]: "not the result of a matrix", "[]": "not the result of a matrix",
        json.dumps(other): "the result of another matrix", json.dumps({**good, "cells": [3]}): "cell 0",
        json.dumps({**good, "cells": {"a": 1}}): "remove it",
    }  # fmt: skip
    for text, said in texts.items():
        Path("r.json").write_text(text, encoding="utf-8")
        assert exit_code(["bench", "--matrix", "m.toml", "-o", "r.json"]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
        assert Path("r.json").read_text(encoding="utf-8") == text
    Path("folder.json").mkdir()
    assert exit_code(["bench", "--matrix", "m.toml", "-o", "folder.json"]) == 2
    told = capsys.readouterr().err
    assert "cannot read folder.json" in told and "remove it" not in told


def test_arms_are_compared_with_the_fastest_stock_arm():
    rows = [
        row("stock-fit", 30), row("stock-ngl", 20), row("oato", 10), row("layers", 19, same_as="stock-ngl"),
        row("split", 1, problems=["it lies elsewhere"]),
    ]  # fmt: skip
    found = [text for text, _ in against_stock(rows)]
    assert found == ["0.67 (0.67..0.67)", "1 (same)", "2.00 (2.00..2.00)", "1 (same)", "refused"]
    assert against_stock(rows[2:]) == (("", None),) * 3


def test_a_comparison_that_fails_says_why(matrix):
    found = bench_matrix.measured(Cell({}, ("--model", "none.gguf", "--device", "none")))
    assert found.error.startswith("none.gguf: no such file") and not found.rows


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_comparison_too(matrix, sent):
    """The comparison is replaced by a sleeping process that ends when it is interrupted."""
    program = (
        "import subprocess, sys; from oallama.cli import main\n"
        "from oallama_contrib.matrix import command as bench_matrix\n"
        "real = subprocess.Popen\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "def popen(words, **options):\n"
        "    return real([*words[:words.index('oallama.run.die_with_parent') + 1], *sleeps], **options)\n"
        "bench_matrix.subprocess.Popen = popen\n"
        "main.main(['bench', '--matrix', 'm.toml'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        (child,) = until(parent.children)
        process.send_signal(sent)
        _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (130 if sent == signal.SIGINT else -sent) and "Traceback" not in told
    must_end(child.pid)


def test_ctrl_c_ends_a_comparison_that_is_being_started(matrix):
    program = (
        "import signal, subprocess, sys; from oallama.cli import main\n"
        "from oallama_contrib.matrix import command as bench_matrix\n"
        "real = subprocess.Popen\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "def interrupted(words, **options):\n"
        "    child = real([*words[:words.index('oallama.run.die_with_parent') + 1], *sleeps], **options)\n"
        "    print('started', child.pid, file=sys.stderr)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return child\n"
        "bench_matrix.subprocess.Popen = interrupted\n"
        "main.main(['bench', '--matrix', 'm.toml'])"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    must_end(int(done.stderr.split()[1]))
