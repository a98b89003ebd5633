"""Which experts a mixture of experts uses, as files for the emulated device: see main.py."""
