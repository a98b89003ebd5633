"""The front door for Python: from a GGUF to operators, profile, affinities, a plan and an engine."""

from oallama.placer.placer import Placer
from oallama.placer.plans import Given

__all__ = ["Given", "Placer"]
