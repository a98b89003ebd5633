"""How much is tested, and the seeds that tests draw with.

`scripts/test` tests what takes minutes, with the same draws in every run. `scripts/test --all`, and any run of named
tests, sets OALLAMA_TEST_ALL: every test, all cases of it, and draws of another seed in each run, told where one fails;
OALLAMA_TEST_SEED=N draws them again.
"""

from __future__ import annotations

import os
import secrets

ALL = bool(os.environ.get("OALLAMA_TEST_ALL"))
SEED = os.environ.get("OALLAMA_TEST_SEED")
FRESH = int(SEED) if SEED else secrets.randbits(32) if ALL else 7
SEEDS = {"fixed": 1, "fresh": FRESH} if ALL else {"fixed": 1}
