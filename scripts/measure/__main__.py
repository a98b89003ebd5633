"""python scripts/measure NAME: see main.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure.main import main

sys.exit(main())
