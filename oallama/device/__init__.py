"""Devices: from `--device` to one that this process may compute on.

`spec` parses the text, `identity` says which device it means here, `opening` opens it. An RPC server is reached by
`rpc_link`, a worker process of our own is started by `rpc_worker`; `guard` and `rpc_abort` survive the loss of either.
`emulated` and `emulated_link` make a device of a `card`. `load_params` fills llama.cpp's parameters; `native_log` and
`interrupt` deal with its log and with Ctrl-C, `child` with work that may crash.
"""
