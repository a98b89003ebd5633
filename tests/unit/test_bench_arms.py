"""Which arms there are: names of stock arms with a micro-batch, and the one that a plan's larger micro-batch brings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench_cases import SETTING, planned

from oallama.bench.arms import ArmMaker
from oallama.bench.records import ArmSpec
from oallama.core.errors import UsageError
from oallama.run.stock import StockPlacement


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ArmMaker:
    """With a --fit that needs no llama.cpp."""
    monkeypatch.setattr(ArmMaker, "_fit", lambda self, name: ArmSpec(name, self.setting, StockPlacement(-1)))
    placer: Any = SimpleNamespace(has_device=True, device=SimpleNamespace(is_pair=False))
    return ArmMaker(placer, SETTING)


def in_micro_batches(n_ubatch: int) -> ArmSpec:
    spec = planned("auto", {})
    assert spec.plan is not None
    return replace(spec, plan={**spec.plan, "workload": {"n_ubatch": n_ubatch}})


@pytest.mark.parametrize("name", ["stock-fit", "stock-cpu"])
def test_a_stock_arm_may_be_had_with_another_micro_batch(name: str, maker: ArmMaker) -> None:
    plain, other, large = (maker.make(name + suffix) for suffix in ("", "-ub1024", "-ub4096"))
    assert (other.name, other.stock) == (f"{name}-ub1024", plain.stock)
    assert other.setting == plain.setting.changed(n_ubatch=1024)
    assert large.setting == plain.setting.changed(n_ubatch=4096, n_batch=4096), "llama.cpp would lower it to -b"


@pytest.mark.parametrize("name", ["stock-fit-ub0", "stock-fit-ub", "auto-ub1024", "stock-other-ub1024"])
def test_a_name_that_is_none_is_refused(name: str, maker: ArmMaker) -> None:
    with pytest.raises(UsageError, match="there is no arm"):
        maker.make(name)


def test_a_plan_with_a_larger_micro_batch_brings_stock_with_the_same(maker: ArmMaker) -> None:
    """So that a gain by the micro-batch alone is not taken for one of the placement."""

    def brought(*specs: ArmSpec) -> list[str]:
        return [spec.name for spec in maker.at_the_plans_ubatch(specs)]

    fit = maker.make("stock-fit")
    assert brought(fit, in_micro_batches(1024), in_micro_batches(2048)) == ["stock-fit-ub1024", "stock-fit-ub2048"]
    assert brought(fit, in_micro_batches(512), in_micro_batches(256)) == []
    assert brought(fit, maker.make("stock-fit-ub1024"), in_micro_batches(1024)) == []
    assert brought(maker.make("stock-cpu"), in_micro_batches(1024)) == [], "there is no --fit to compare with"
    assert brought(fit, in_micro_batches(4096)) == [], "no arm gets there with -b 2048"
