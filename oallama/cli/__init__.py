"""The command line: one module a command, called by `main`; `options` and `output` are shared by all."""
