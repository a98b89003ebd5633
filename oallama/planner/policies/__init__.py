"""Policies by name, a file each. registry.py says how to make one."""

from importlib import import_module

for _name in ("oato", "sliced", "stock", "hetegen", "twinpilots", "flexgen", "fiddler", "atsinfer"):  # as help has them
    import_module(f"{__name__}.{_name}")
