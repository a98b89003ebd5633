"""Device memory that is refused at each allocation in turn: an error of ours, or a plan that holds less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.logits import QUANTISED_NMSE, TOKENS, nmse, stock_logits
from gguf_factory import write_gguf
from seeds import ALL

from oallama.core.errors import DeviceError, OallamaError
from oallama.core.options import Options
from oallama.device.load_params import load_bridge
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.run.engine import Engine

CARD = "emulated:vram=1GiB,scale=1,values=real"

PLANS: dict[str, Callable[[Placer], Plan]] = {
    "whole layers": lambda placer: placer.plan("layers", n_prompt=64, n_gen=8),
    "slices": lambda placer: placer.plan("split", n_prompt=64, n_gen=8),
    "streams": lambda placer: placer.plan("scheinfer", n_prompt=256, n_gen=32),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of more layers than the ring has slots."""
    return write_gguf(tmp_path_factory.mktemp("model") / "model.gguf", "llama", weight_type="Q4_0", n_layer=4)


@pytest.mark.parametrize("kind", PLANS if ALL else ["streams"])
def test_each_allocation_may_be_refused(kind: str, model: Path) -> None:
    """While a model is loaded, its prompt computed and a token made, with the plan as it is and as it was shrunk."""
    profile = slow_cpu_fast_card(model, 1e9)
    placer = Placer.load(model, device=CARD, profile=profile, gpu_weights=0.3, threads=1)
    plan = PLANS[kind](placer)
    wanted, before = stock_logits(model, TOKENS), load_bridge().split().memory()
    ended: list[str] = []
    n = 0
    while True:
        n += 1
        options = Options(threads=1, device=f"{CARD},fail_alloc={n}")
        try:
            with Engine(placer.model, plan, options, probed=True, progress=False) as engine:
                assert nmse(engine.logits(TOKENS), wanted) <= QUANTISED_NMSE
                assert engine.generate(list(range(1, 40)), max_tokens=2, temperature=0).n_gen == 2
            ended.append("done")
        except OallamaError as error:
            assert isinstance(error, DeviceError), error
            assert "no room" in str(error) and "use a smaller --vram, -c or -ub" in str(error)
            ended.append(str(error))
        stats = load_bridge().emulated().stats()
        assert (stats.device_bytes, stats.pinned_bytes) == (0, 0)
        assert load_bridge().split().memory() == before
        if stats.n_allocations < n:
            break
    assert ended[-1] == "done" and len(ended) > 2
    assert any(said != "done" for said in ended), "what does not fit is said, not passed over"
