"""-ngl: whole layers, planned for the very workload that is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from worlds import model_info, weights_of

from oallama.cli.policy import PolicyOptions, note_planned, note_unused
from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import Options
from oallama.core.types import Workload
from oallama.placer import Given

LOAD = Workload(n_prompt=64, n_gen=16, n_ctx=512, n_ubatch=128)


class Known:
    """A placer on a device with so many bytes to spare; what it was asked for."""

    model = model_info(n_layer=2)
    operators = weights_of(model)

    def __init__(self, spare: int = 0, device: str = "RPC0") -> None:
        self.memory, self.device, self.asked = SimpleNamespace(limit=100, spare=spare), device, {}

    def profile(self) -> Any:
        return SimpleNamespace(device=self.device)

    def plan(self, given: Given, *, workload: Workload) -> Any:
        self.asked = {"names": given.on_device, "n_layers": given.gpu_layers, "load": workload, "policy": given.name}
        return self


def test_layers_are_planned_for_the_micro_batch_that_is_run() -> None:
    placer = Known()
    PolicyOptions(None, 2).plan(placer, LOAD)  # type: ignore[arg-type]
    assert placer.asked.pop("names") == [o.name for o in placer.operators if o.layer in (1, None)]
    assert placer.asked == {"n_layers": 2, "policy": "layers", "load": LOAD}


def test_layers_that_do_not_fit_or_have_no_device_are_refused() -> None:
    with pytest.raises(DoesNotFit, match="-ngl 2 needs 105 B on RPC0"):
        PolicyOptions(None, 2).plan(Known(spare=-5), LOAD)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="-ngl needs a device"):
        PolicyOptions(None, 2).plan(Known(device="CPU"), LOAD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "allowed"), [("hetegen", True), ("twinpilots", True), ("flexgen", True), ("atsinfer", False)]
)
def test_prefetch_is_for_policies_that_stream(policy: str, allowed: bool) -> None:
    class Planning(Known):
        def plan(self, name: str, *, workload: Workload, **rules: Any) -> Any:  # type: ignore[override]
            return name, rules["prefetch"]

    placer: Any = Planning()
    if allowed:
        assert PolicyOptions(policy, None, prefetch="layer").plan(placer, LOAD) == (policy, "layer")
    else:
        with pytest.raises(UsageError, match="streams none"):
            PolicyOptions(policy, None, prefetch="layer").plan(placer, LOAD)


@pytest.mark.parametrize(
    ("policy", "options", "has_device", "says"),
    [
        ("hetegen", {}, False, "note: --policy hetegen places weights on a device, and there is none; name one with"),
        ("oato", {"vram": 1}, False, "note: --vram limits a device, and there is none"),
        ("hetegen", {"vram": 1}, True, ""),
        ("auto", {}, False, ""),
        ("cpu", {}, False, ""),
        (None, {}, False, ""),
    ],
)
def test_a_policy_that_needs_a_device_says_that_there_is_none(
    capsys: pytest.CaptureFixture[str], policy: str | None, options: dict[str, Any], has_device: bool, says: str
) -> None:
    placer: Any = SimpleNamespace(options=Options(**options), has_device=has_device)
    note_unused(placer, PolicyOptions(policy, None))
    said = capsys.readouterr().err
    assert said.startswith(says) and bool(said) == bool(says)


def test_limits_that_a_plan_does_not_heed_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    note_planned(Options(vram=1, gpu_weights=0.5, vram_fill=0.5))
    note_planned(Options(vram_fill=0.8))
    note_planned(Options(n_ctx=512))
    assert capsys.readouterr().err.splitlines() == [
        "note: --vram and --gpu-weights and --vram-fill change nothing: the plan says what is where",
        "note: --vram-fill changes nothing: the plan says what is where",
    ]
