"""A llama_cpp.Llama whose weights lie where a plan wants them.

Llama's constructor knows neither devices nor buffer type overrides nor automatic flash attention. It keeps its
parameter structs as attributes and reads them back when it loads, so a subclass that answers for these attributes can
fill in the rest, without touching anything that other users of llama_cpp see. Importing this module imports llama_cpp.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import llama_cpp

from oallama.core.errors import UsageError
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import LoadSettings, ModelParams, apply_context
from oallama.run.load_checks import release

if TYPE_CHECKING:
    from oallama.model.memory import BufferBytes
    from oallama.plan.plan import Plan
    from oallama.run.held import EngineMemory
    from oallama.run.split import LoadedSplit


CLOSED = "this Llama is closed; create a new one"
_TEMPLATES = "tokenizer.chat_template"


class PlacedLlama(llama_cpp.Llama):  # type: ignore[misc]  # untyped base
    """A llama_cpp.Llama, which Placer.llama makes. Use it in a `with` statement, or close it.

    plan: as loaded; if the device had less memory than planned, slices that did not fit are on the host, and warnings
    says so. device: its name. memory: bytes taken.
    """

    plan: Plan
    device: str
    memory: EngineMemory
    buffers: tuple[BufferBytes, ...]
    warnings: tuple[str, ...]
    _settings: LoadSettings
    _placement: ModelParams
    _progress: Any  # api.llama_progress_callback
    split: LoadedSplit | None  # the split operators; None without any
    _release: Callable[[], object] | None = None

    @classmethod
    def load(
        cls, settings: LoadSettings, placement: ModelParams, progress: Any, arguments: Mapping[str, Any]
    ) -> PlacedLlama:
        """Load as `settings` and `placement` say. arguments: further arguments of Llama. Raises ValueError, as Llama
        does, where llama.cpp refuses."""
        llama = cls.__new__(cls)
        llama._settings, llama._placement = settings, placement
        llama._progress, llama.split = progress, None
        given = {"verbose": False, **arguments}
        if given.get("chat_format") is None and given.get("chat_handler") is None:
            given["chat_handler"] = _refuse_chat
        try:
            llama.__init__(  # type: ignore[misc]
                settings.path,
                n_ctx=settings.n_ctx,
                n_batch=settings.n_batch,
                n_ubatch=settings.n_ubatch,
                n_threads=settings.n_threads or None,
                n_threads_batch=settings.n_threads or None,
                **given,
            )
        except BaseException:
            llama.close()
            raise
        return llama

    def own(self, held: ExitStack, split: LoadedSplit | None) -> None:
        """Free what it holds, and then `held`, at its end: when it is closed, or nobody refers to it. split: its
        operators in the split back end."""
        held.enter_context(contextlib.closing(self._stack))  # refers to what Llama made, not to the Llama
        self.split = split
        self._release = weakref.finalize(self, release, held)

    def __enter__(self) -> PlacedLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """The GGUF's text metadata, without chat templates, which Llama would compile: programs from strangers."""
        found: dict[str, str] = self.__dict__["metadata"]
        return found

    @metadata.setter
    def metadata(self, found: dict[str, str]) -> None:
        self.__dict__["metadata"] = {key: value for key, value in found.items() if not key.startswith(_TEMPLATES)}

    # llama_cpp's closes, which the finalizer does. A Ctrl-C that arrived in a Python function here would be lost, so
    # this is a C function without arguments
    __del__ = staticmethod(bool)

    def close(self) -> None:
        """Free the model and its device; may be called twice. Later calls raise UsageError; llama.cpp would read freed
        memory."""
        with held_interrupt():  # in what is freed here it would be lost
            if self._release is not None:
                self._release()
            else:  # it was not made whole
                super().close()
            self._forget()

    def _forget(self) -> None:
        for name in ("_ctx", "_model", "_batch", "tokenizer_"):
            if name in self.__dict__:  # it has been made
                self.__dict__[name] = _Freed()

    def __reduce__(self) -> Any:
        raise TypeError("a placed Llama cannot be pickled; save the plan and create a new Llama from it")


class _Freed:
    """Stands in for a freed object, and raises on any use."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(CLOSED)


def _refuse_chat(**_: Any) -> Any:
    raise UsageError("this Llama has no chat template; pass chat_format to Placer.llama, or chat with Placer.engine")
