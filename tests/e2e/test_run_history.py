"""From runs of a loaded model to a profile that is corrected by them: what blocks took, kept, and adopted."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.forced import ffn, forced

from oallama.core.history import BlockRuns, SeenPasses
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE
from oallama.placer import Placer
from oallama.profile.history import read_history, timings_of
from oallama.profile.store import FOLDER_VARIABLE

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

WORKER = "rpc-worker:1"
N_PROMPT, N_GEN = 40, 48
TRIED = 2  # tokens that llama-server computes when it has loaded a model, to see whether its memory can be cut


@pytest.fixture
def placer(two_layers: Path, worker_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placer:
    """With a machine that is measured already."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for name in ("profile_model", "stored_profile"):
        monkeypatch.setattr(f"oallama.profile.profiler.{name}", lambda *_, **__: worker_profile)
    return Placer.of_file(str(two_layers), Options(device=WORKER, threads=1))


def test_what_blocks_take_is_kept_and_the_profile_follows_it(placer: Placer, two_layers: Path) -> None:
    plan = forced(two_layers, WORKER, ffn(0.5)).plan
    with placer.engine(plan) as engine:
        engine.generate([1 + i % 99 for i in range(N_PROMPT)], max_tokens=N_GEN + 1, temperature=0.0)
        runs = engine.runs()
        assert engine.runs() == runs, "since the model was loaded"
    blocks = {one.block for one in runs}
    assert len(blocks) == 2, "an FFN of each layer"
    first, last = sorted(blocks)
    of_first = {one.batch: (one.n_runs, one.n_tokens) for one in runs if one.block == first and one.batch != TRIED}
    of_last = {one.batch: (one.n_runs, one.n_tokens) for one in runs if one.block == last and one.batch != TRIED}
    assert of_first == {1: (N_GEN, N_GEN), 64: (1, N_PROMPT)}
    assert of_last == {1: (N_GEN + 1, N_GEN + 1)}, "a prompt's last layer computes its last token alone"
    assert all(min(one.cpu_s, one.other_s) > 0 for one in runs)

    placer.keep_block_times(plan, runs)
    history = read_history(placer.model.fingerprint, placer.machine_key, timings_of(placer.profile()))
    single = next(one for one in history.seen if one.batch == 1)
    assert isinstance(single, SeenPasses) and single.n_passes == N_GEN
    assert single.cpu_s == pytest.approx(
        next(one.cpu_s for one in runs if (one.block, one.batch) == (first, 1)) / N_GEN
    )
    assert single.predicted_cpu_s > 0 and single.predicted_device_s > 0

    before = placer.profile()
    slow_s = 4 * single.predicted_cpu_s
    for _ in range(9):  # a machine that has become four times as slow
        placer.keep_block_times(plan, [BlockRuns(first, 1, 1024, 1024, 1024 * slow_s, 0.0, 0.0)])
    assert "CPU 4" in placer.adopt_history()
    after = placer.profile()
    ratios = {
        round(new.seconds / old.seconds, 1)
        for old, new in zip(before.cases, after.cases, strict=True)
        if old.device == CPU_DEVICE and old.n_tokens == 1
    }
    assert ratios == {4.0}
    assert placer.adopt_history() == "", "once"
    assert Placer.of_file(str(two_layers), placer.options).profile() == after, "from then on"


def test_a_profile_that_is_given_is_not_corrected(placer: Placer, worker_profile: Profile, two_layers: Path) -> None:
    given = Placer.of_file(str(two_layers), placer.options, worker_profile)
    given.keep_block_times(forced(two_layers, WORKER, ffn(0.5)).plan, [])
    assert given.adopt_history() == "" and given.profile() is worker_profile
