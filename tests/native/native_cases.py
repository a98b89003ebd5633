"""What tests of native code do in a process of their own, where ggml may abort: python -m native_cases."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

import ggml_bridge
from ggml_bridge.child import child_main
from oallama.device.load_params import BuftOverride

EMULATED = "Emulated0"
TOKENS = (1, 5, 9, 3, 2, 7, 4)


#
# a device of an RPC server
#


def rpc_device(endpoint: str) -> dict[str, Any]:
    bridge = ggml_bridge.load()
    [device] = bridge.rpc_add(endpoint)
    info = bridge.device(device)
    again = bridge.rpc_add(endpoint)
    return {"name": device, "again": again, "type": info.type, "backend": info.backend, "total": info.memory_total}


def rpc_mul_mat(endpoint: str) -> dict[str, Any]:
    bridge, results = ggml_bridge.load(), {}
    [device] = bridge.rpc_add(endpoint)
    for kind in ("F16", "Q4_0", "Q4_K"):
        for e, used, n_tokens in ((1, 0, 1), (4, 0, 3), (8, 2, 5)):
            with bridge.mul_mat(device, None, kind, 512, 96, e, used, n_tokens, 1 << 20) as timer:
                results[f"{kind} {e} {used} {n_tokens}"] = timer.check()
    return results


def lose_the_server(endpoint: str, pid: int) -> dict[str, Any]:
    bridge = ggml_bridge.load()
    [device] = bridge.rpc_add(endpoint)
    with bridge.mul_mat(device, None, "Q4_0", 512, 96, working_set_bytes=0) as timer:
        timer.run(1)
        os.kill(pid, signal.SIGKILL)
        timer.run(100)
    raise AssertionError("the server is lost")


#
# the emulated device
#


def touch(parameters: str) -> dict[str, Any]:
    """Read a byte of a device buffer."""
    bridge = ggml_bridge.load()
    bridge.emulated().register(parameters)
    library = bridge.libraries.llama_cpp.llama_cpp._lib
    library.ggml_backend_buft_alloc_buffer.restype = ctypes.c_void_p
    library.ggml_backend_buft_alloc_buffer.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.ggml_backend_buffer_get_base.restype = ctypes.c_void_p
    library.ggml_backend_buffer_get_base.argtypes = [ctypes.c_void_p]
    buffer = library.ggml_backend_buft_alloc_buffer(bridge.buft(EMULATED), 4096)
    return {"byte": ctypes.c_char.from_address(library.ggml_backend_buffer_get_base(buffer)).value.hex()}


def busy(parameters: str, seconds: float) -> int:
    """Use the device for so long; how often another one wanted its core."""
    bridge = ggml_bridge.load()
    device = bridge.emulated()
    device.register(parameters)
    device.reset_stats()
    end = time.monotonic() + seconds
    with bridge.transfer(EMULATED, "h2d", True, 1 << 16) as timer:
        while time.monotonic() < end:
            timer.run(1)
    return device.stats().n_shared


def two(parameters: str) -> dict[str, Any]:
    """Use the device while another process does, too."""
    command = [sys.executable, "-m", "native_cases", parameters]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # it is at work
        together = 0
        for _ in range(20):  # it may be kept from working for a while
            together = together or busy(parameters, 1.0)
        other.kill()
    return {"together": together}


#
# the split back end
#


def split_everywhere(path: str, plan: str, pattern: str) -> dict[str, Any]:
    """Every tensor in the split buffer type, embeddings and norms too (`-ot '.*=OALLAMA_Split'`): what `decode` returns
    for a prompt, the last token's logits, and the plan's problems."""
    llama_cpp = ggml_bridge.load().libraries.llama_cpp.llama_cpp
    with ggml_bridge.load().split().plan(plan) as made:
        overrides = (BuftOverride * 2)(BuftOverride(pattern.encode(), made.buft))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        context_params = llama_cpp.llama_context_default_params()
        context_params.n_ctx, context_params.n_threads, context_params.n_threads_batch = 64, 1, 1
        context = llama_cpp.llama_init_from_model(model, context_params)
        tokens = (llama_cpp.llama_token * len(TOKENS))(*TOKENS)
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(TOKENS)))
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        logits = llama_cpp.llama_get_logits(context)[:n_vocab] if status == 0 else []
        usable, problems = made.problems()
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    return {"status": status, "logits": logits, "usable": usable, "problems": problems}


CASES = {case.__name__: case for case in (rpc_device, rpc_mul_mat, lose_the_server, touch, two, split_everywhere)}

if __name__ == "__main__":
    if len(sys.argv) == 2:
        busy(sys.argv[1], 0.1)
        print("at work", flush=True)
        busy(sys.argv[1], 30.0)
    else:
        child_main(lambda request, progress: CASES[request.pop("case")](**request))
