"""What the gate would have kept, had a policy won: what a busy machine measures is nothing to rely on."""

from __future__ import annotations

from oallama.bench.prepare import setting_of
from oallama.bench.records import StockPlacement
from oallama.bench.stats import Ratio
from oallama.core.types import Workload
from oallama.gate.key import gate_key
from oallama.gate.pairs import Trial
from oallama.gate.store import KeptVerdict, write_kept
from oallama.gate.verdict import decide
from oallama.placer import Placer


def keep_winner(placer: Placer, load: Workload, policy: str) -> None:
    """Twice as fast as stock, which has all layers on the device."""
    key, cap = gate_key(placer, load), setting_of(placer, load.n_ctx, load.n_ubatch).cap
    won = (Trial(policy, 0, Ratio(2.0, 1.9, 2.1, 6)),)
    verdict = decide(key, "stock-fit", won, cap.device_bytes or 0, "2026-11-23T00:00:00Z", 1.0)
    write_kept(KeptVerdict(verdict, StockPlacement(-1)))
