"""The command line: one module per command, called by `main`; all share `options` and `output`."""
