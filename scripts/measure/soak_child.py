"""Loads and frees engines again and again in this process, and says after some what it holds, a line of JSON each.

usage: soak_child.py MODEL DEVICE LOADS EVERY SEED SECONDS
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from e2e.what_is_held import held_now  # noqa: E402

from measure.divergence import profile_of  # noqa: E402
from oallama import Placer, Plan  # noqa: E402
from oallama.core.options import Options  # noqa: E402
from oallama.device.load_params import load_bridge  # noqa: E402
from oallama.run.engine import Engine  # noqa: E402

LONGEST, MOST = 200, 4  # tokens of a prompt and of its answer
WARM = 30  # loads in which libraries, caches and the allocator find their size: ten of each plan

PLANS: dict[str, Callable[[Placer], Plan]] = {
    "whole layers": lambda placer: placer.plan("layers", n_prompt=64, n_gen=8),
    "slices": lambda placer: placer.plan("split", n_prompt=64, n_gen=8),
    "streams": lambda placer: placer.plan("scheinfer", n_prompt=256, n_gen=32),
}
"""Taken in turns."""


def main(path: str, device: str, loads: int, every: int, seed: int, seconds: int) -> None:
    end = time.monotonic() + seconds
    rng, n_tokens = random.Random(seed), 0
    placer = Placer.load(path, device=device, profile=profile_of(path), gpu_weights=0.3, threads=1)
    plans = [make(placer) for make in PLANS.values()]
    options = Options(threads=1, device=device)
    for n in range(1, WARM + loads + 1):
        plan = plans[n % len(plans)]
        with Engine(placer.model, plan, options, probed=True, progress=False) as engine:
            longest = min(LONGEST, engine.n_ctx - MOST)
            prompt = [rng.randrange(3, min(engine.n_vocab, 700)) for _ in range(rng.randint(1, longest))]
            engine.logits(prompt[: rng.randint(1, len(prompt))])
            made = engine.generate(prompt, max_tokens=rng.randint(1, MOST), seed=n)
            n_tokens += len(prompt) + made.n_gen
        if n >= WARM and (n - WARM) % every == 0:
            say(n - WARM, n_tokens)
            if time.monotonic() > end:
                return


def say(loads: int, n_tokens: int) -> None:
    gc.collect()
    bridge = load_bridge()
    emulated, split = bridge.emulated().stats(), bridge.split().memory()
    held = {
        **asdict(held_now()),
        "tasks": len(list(Path("/proc/self/task").iterdir())),  # threads of native code too
        "device_bytes": emulated.device_bytes,
        "pinned_bytes": emulated.pinned_bytes,
        "split_bytes": sum(getattr(split, name) for name in split.__slots__),
    }
    print(json.dumps({"loads": loads, "tokens": n_tokens, **held}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]))
