"""Policies by name, a file each. registry.py says how to make one. Those of other packages are entry points."""

from importlib import import_module

from oallama.core.plugins import contributed

for _name in ("oato", "sliced", "stock"):  # as help has them
    import_module(f"{__name__}.{_name}")
contributed("oallama.policies")
