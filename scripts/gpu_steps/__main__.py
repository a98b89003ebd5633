"""python -m gpu_steps: what scripts/gpu_run starts once Python and libraries are chosen."""

from __future__ import annotations

import sys

from gpu_steps.main import main

if __name__ == "__main__":
    sys.exit(main())
