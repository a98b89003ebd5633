"""A llama_cpp.Llama whose weights lie where a plan wants them.

Llama's constructor knows neither devices nor buffer type overrides nor automatic flash attention. It keeps its
parameter structs as attributes and reads them back when it loads, so a subclass that answers for these attributes can
fill in the rest, without touching anything that other users of llama_cpp see. Importing this module imports llama_cpp.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp import llama_cpp as api

from oallama.core.errors import UsageError
from oallama.device.load_params import LoadSettings, ModelParams, apply_context
from oallama.run.chat_format import offer_templates, without_templates
from oallama.run.turns import CLOSED

if TYPE_CHECKING:
    from ggml_bridge.routing import RoutingRecorder


class PlacedLlama(llama_cpp.Llama):  # type: ignore[misc]  # untyped base
    """Behaves like any Llama. Make one with `load`; it shares model, context and KV cache with its engine."""

    _settings: LoadSettings
    _placement: ModelParams
    _progress: Any  # api.llama_progress_callback
    _recorder: RoutingRecorder | None

    @classmethod
    def load(
        cls,
        settings: LoadSettings,
        placement: ModelParams,
        progress: Any,
        recorder: RoutingRecorder | None = None,
    ) -> PlacedLlama:
        """Load as `settings` and `placement` say. recorder: of the context's routers; it must outlive the Llama. Raises
        ValueError, as Llama does, where llama.cpp refuses."""
        llama = cls.__new__(cls)
        llama._settings, llama._placement = settings, placement
        llama._progress, llama._recorder = progress, recorder
        try:
            llama.__init__(  # type: ignore[misc]
                settings.path,
                n_ctx=settings.n_ctx,
                n_batch=settings.n_batch,
                n_ubatch=settings.n_ubatch,
                n_threads=settings.n_threads or None,
                n_threads_batch=settings.n_threads or None,
                verbose=False,
            )
        except BaseException:
            llama.close()
            raise
        offer_templates(llama, llama.metadata)
        return llama

    @property
    def model_params(self) -> Any:
        """llama_model_params, placed."""
        params = self.__dict__["model_params"]
        self._placement.apply(params)
        params.progress_callback = self._progress
        return params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self.__dict__["model_params"] = params

    @property
    def context_params(self) -> Any:
        """llama_context_params, as the settings say."""
        params = self.__dict__["context_params"]
        if not hasattr(self, "_ctx"):
            apply_context(self._settings, params)
            if self._recorder is not None:
                params.cb_eval = ctypes.cast(self._recorder.callback, api.ggml_backend_sched_eval_callback)
                params.cb_eval_user_data = self._recorder.user_data
        return params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self.__dict__["context_params"] = params

    @property
    def verbose(self) -> bool:
        """False, but True while the model loads: else Llama points the process' stdout and stderr at /dev/null for
        that time, and nobody would read why the process ends there. What llama.cpp logs is caught anyway."""
        return not hasattr(self, "_model") or bool(self.__dict__["verbose"])

    @verbose.setter
    def verbose(self, verbose: bool) -> None:
        self.__dict__["verbose"] = verbose

    @property
    def metadata(self) -> dict[str, str]:
        """The GGUF's text metadata; without chat templates while Llama is made, which would compile them all."""
        found: dict[str, str] = self.__dict__["metadata"]
        return found if hasattr(self, "_sampler") else without_templates(found)

    @metadata.setter
    def metadata(self, found: dict[str, str]) -> None:
        self.__dict__["metadata"] = found

    # llama_cpp's closes, which the engine has done by then. Ctrl-C that arrived in a Python function here would be
    # lost, so this is none, and takes nothing
    __del__ = staticmethod(bool)

    def close(self) -> None:
        """Free the model; what is asked of it afterwards raises UsageError, where llama.cpp would read freed memory."""
        super().close()
        self._forget()

    def _forget(self) -> None:
        for name in ("_ctx", "_model", "_batch", "tokenizer_"):
            if name in self.__dict__:  # it has been made
                self.__dict__[name] = _Freed()

    def __reduce__(self) -> Any:
        raise TypeError("a placed Llama cannot be pickled; save the plan and make another engine from it")


class _Freed:
    """In the place of what was freed."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(CLOSED)
