"""Devices: from `--device` to an open device.

`spec` parses the text, `identity` says which device it means here, `opening` opens it. `rpc_link` connects to an RPC
server. `native_abort` ends the process in one sentence where the device is lost or hangs. `emulated` and
`emulated_link` make a device of a `card`. `load_params` fills llama.cpp's parameters; `native_log` and `interrupt` deal
with its log and with Ctrl-C, `child` with work that may crash.
"""
