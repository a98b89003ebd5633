"""What tests draw at random: another seed in each run, told where one fails; OALLAMA_TEST_SEED=N draws it again."""

from __future__ import annotations

import os
import secrets

SEED = os.environ.get("OALLAMA_TEST_SEED")

FRESH = int(SEED) if SEED else secrets.randbits(32)
