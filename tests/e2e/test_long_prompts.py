"""Prompts that may not fit: counted before anything is measured or loaded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from e2e.forced import forced

from oallama.cli.placement_options import PlacementOptions, run_workload
from oallama.cli.run import command
from oallama.core.errors import ModelFileError, UsageError
from oallama.core.options import Options
from oallama.placer import Placer
from oallama.run.prompt import Prompt, likely_tokens
from oallama.run.vocabulary import count_tokens

LONG = "once upon a time " * 600


def placer(model: Path, **options: Any) -> Placer:
    return Placer.of_file(str(model), Options(device="none", **options))


def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        count_tokens(str(tmp_path / "bad.gguf"), "once")


def test_the_context_follows_the_true_count_and_a_long_one_is_a_warning(
    f16: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = placer(f16)
    n_prompt = likely_tokens(str(f16), Prompt(LONG), None, 16)
    assert n_prompt == count_tokens(str(f16), LONG)
    workload = run_workload(one, n_prompt, 16)
    assert n_prompt + 16 <= workload.n_ctx < n_prompt + 16 + 256
    assert workload.n_prompt == n_prompt
    said = capsys.readouterr().err
    assert f"warning: the context of {workload.n_ctx} tokens is longer than the {one.model.n_ctx_train}" in said
    run_workload(one, 4, 16)
    assert capsys.readouterr().err == ""


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_measured(
    f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any) -> None:
        raise AssertionError("something was measured or planned")

    monkeypatch.setattr(PlacementOptions, "made_plan", measured)
    monkeypatch.setattr(Placer, "engine", measured)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageError, match=r"the prompt has \d+ tokens but the context holds 300"):
        command.main([str(f16), LONG, "-c", "300", "--device", "rpc-worker:1"], standalone_mode=False)
    plan = forced(f16).plan
    plan.save(tmp_path / "plan.json")
    planned = plan.workload.n_ctx
    with pytest.raises(UsageError, match=rf"tokens but the context holds {planned}"):
        command.main([LONG, "--plan", str(tmp_path / "plan.json"), "-m", str(f16)], standalone_mode=False)
