"""python scripts/routing NAME: see main.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from routing.main import main

sys.exit(main())
