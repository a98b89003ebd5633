"""What the gate would have kept, had a policy won: what a busy machine measures is nothing to rely on."""

from __future__ import annotations

from oallama.bench.prepare import setting_of
from oallama.bench.records import BenchTest, StockPlacement
from oallama.core.types import Workload
from oallama.gate.store import gate_key, write_verdict
from oallama.gate.verdict import Race, Verdict
from oallama.placer import Placer


def keep_winner(placer: Placer, load: Workload, policy: str) -> None:
    """Twice as fast as stock, which has all layers on the device."""
    cap = setting_of(placer, load.n_ctx, load.n_ubatch).cap
    won = Race(policy, 2.0, ((2.0, 1.0), (2.1, 1.0), (1.9, 1.0), (2.0, 1.0)))
    key = gate_key(placer, load, cap.device_bytes or 0)
    write_verdict(Verdict(key, "stock-fit", StockPlacement(-1), (BenchTest(64, 16),), (won,)))
