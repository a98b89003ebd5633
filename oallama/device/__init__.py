"""Devices: what `--device` may name, and opening one so that its loss becomes a DeviceError."""
