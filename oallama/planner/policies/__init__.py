"""Policies by name, a file each. registry.py says how to make one, and finds those of other packages."""

from importlib import import_module

for _name in ("oato", "sliced", "stock"):  # as help has them
    import_module(f"{__name__}.{_name}")
