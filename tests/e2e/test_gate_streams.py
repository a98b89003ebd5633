"""The gate on an emulated device: a plan that streams wins where that pays, and what wins changes with the link.

Everything is real but the clock: plans, stock's --fit, arms that load and compute in processes of their own, what they
read back, the verdict and its file, and the engine at the end. A sample's seconds are those of the described machine
that the plans were made for, so that the outcome does not depend on how busy this one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_fast_card
from gguf_factory import write_gguf

from oallama.bench.ab import Bench, ProgressCallback, run_bench
from oallama.bench.fit_plan import stock_plan
from oallama.bench.process import ArmProcess, Deadline
from oallama.bench.records import ArmSpec, BenchResult, BenchTest, Sample
from oallama.core.types import Workload
from oallama.gate.run import Gated, gated_plan
from oallama.placer import Placer
from oallama.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("prober")

DEVICE = "emulated:vram=1GiB,scale=1,values=real"
LOAD = Workload(256, 32, 512)
PATIENCE_S = 250.0  # with any one answer of an arm; the clock that the gate looks at stands still
WEIGHTS_SHARE = 0.3  # of the weights that may lie on the device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "model.gguf", "llama", weight_type="Q4_0", n_layer=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where verdicts are remembered."""
    made = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OALLAMA_CACHE_DIR", str(made))
        yield made


class DescribedArm(ArmProcess):
    """Loads and computes like any arm, and is warmed up; its samples are the described machine's seconds."""

    def __init__(self, placer: Placer, spec: ArmSpec, deadline: Deadline | None) -> None:
        super().__init__(spec, deadline)
        self._placer = placer
        self._sample = cache(self._priced)

    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        return {test: self._sample(test) for test in tests}

    def _priced(self, test: BenchTest) -> Sample:
        if self.spec.plan is not None:
            plan = Plan.from_json(dict(self.spec.plan))
        else:
            assert self.spec.stock is not None
            plan = stock_plan(self._placer, LOAD, self.spec.stock)
        load = Workload(test.n_prompt, test.n_gen, LOAD.n_ctx, plan.workload.n_ubatch)
        seconds = self._placer.price(plan, load)
        return Sample(seconds.ttft_s, test.n_gen * seconds.tpot_s)


def gated(model: Path, link_bytes_per_s: float) -> tuple[Placer, Gated, list[str]]:
    """What the gate lets through on that link, and the arms that it measured."""
    profile = slow_cpu_fast_card(model, link_bytes_per_s)
    placer = Placer.load(model, device=DEVICE, profile=profile, gpu_weights=WEIGHTS_SHARE, threads=1)
    measured: list[str] = []

    def measure(bench: Bench, progress: ProgressCallback) -> BenchResult:
        measured.extend(arm.name for arm in bench.arms)
        return run_bench(bench, progress, start=partial(DescribedArm, placer))

    found = gated_plan(placer, LOAD, measure=measure, budget_s=PATIENCE_S, clock=lambda: 0.0)
    return placer, found, measured


def streamed_share(placer: Placer, plan: Plan) -> float:
    """Of the model's weights."""
    streamed = sum(o.bytes * p.cg for o, p in zip(placer.operators, plan.operators, strict=True))
    return streamed / sum(o.bytes for o in placer.operators)


@pytest.fixture(scope="module")
def slow(model: Path, folder: Path) -> tuple[Placer, Gated, list[str]]:
    """On a link that is too slow to help."""
    return gated(model, 1e6)


@pytest.fixture(scope="module")
def fast(model: Path, slow: object) -> tuple[Placer, Gated, list[str]]:
    """On a fast one, with the slow one's verdict remembered."""
    return gated(model, 1e9)


def test_a_plan_that_streams_passes_where_it_pays(fast: tuple[Placer, Gated, list[str]]) -> None:
    placer, found, measured = fast
    assert not found.remembered and measured[0] == "stock-fit" and "scheinfer" in measured
    won = found.verdict.won
    assert won is not None and won.policy == "scheinfer" and streamed_share(placer, found.plan) > 0.1
    assert won.ratio is not None and won.ratio.low > 1.1
    with placer.engine(found.plan, progress=False) as engine:
        assert engine.generate(list(range(1, 40)), max_tokens=4, temperature=0).n_gen == 4
        assert engine.split_stats is not None and engine.split_stats.decode.bytes_streamed > 0


def test_what_passes_changes_with_the_link(
    slow: tuple[Placer, Gated, list[str]], fast: tuple[Placer, Gated, list[str]]
) -> None:
    assert fast[2], "a verdict for one link is none for another"
    assert slow[1].verdict.settled and fast[1].verdict.settled
    assert streamed_share(slow[0], slow[1].plan) == 0 < streamed_share(fast[0], fast[1].plan)


def test_the_verdict_is_remembered(model: Path, fast: tuple[Placer, Gated, list[str]]) -> None:
    _, again, measured = gated(model, 1e9)
    assert again.remembered and not measured and again.plan == fast[1].plan
