"""Policies, one file each. registry.py defines @policy, and finds the policies of other packages."""

from importlib import import_module

for _name in ("oato", "sliced", "stock"):  # as help has them
    import_module(f"{__name__}.{_name}")
