"""python tests/fuzz: see main.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.main import main  # noqa: E402

sys.exit(main())
