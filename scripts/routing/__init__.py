"""Routing files for the emulated device, recorded or drawn: see main.py."""
