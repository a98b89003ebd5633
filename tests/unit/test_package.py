"""What `import oallama` offers, and what its errors say to someone who writes Python."""

import importlib
import traceback

import pytest
from gguf_factory.write import write_gguf

import oallama
from oallama.core.errors import DoesNotFit, OallamaError, UsageError


@pytest.mark.parametrize("name", oallama.__all__)
def test_every_public_name_is_listed_and_there(name):
    assert name in dir(oallama)
    assert getattr(oallama, name) is not None


def test_errors_are_public():
    assert oallama.DoesNotFit is oallama.errors.DoesNotFit is DoesNotFit
    errors = importlib.import_module("oallama.core.errors")
    every = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, OallamaError)}
    assert every <= set(oallama.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Plaser'"):
        _ = oallama.Plaser


def test_messages_name_the_argument_below_the_option():
    error = DoesNotFit(2, 1, "CUDA0")
    assert error.__notes__ == ["in Python: n_ctx for -c, n_ubatch for -ub, vram for --vram"]
    assert "in Python" not in str(error)
    assert not hasattr(UsageError("a well-chosen word; run `oallama plan`"), "__notes__")
    shown = "".join(traceback.format_exception(error))
    assert "n_ctx for -c" in shown


@pytest.fixture
def placer(tmp_path):
    return oallama.Placer.load(write_gguf(tmp_path / "m.gguf", "llama"), device="none")


@pytest.mark.parametrize("wrong", [{"phase": "deco"}, {"fill": "all"}, {"affinity": "papr"}])
def test_a_wrong_word_is_refused(placer, wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is '{next(iter(wrong.values()))}'; give one of"):
        placer.report(**wrong)


def test_a_wrong_prefetch_is_refused(placer):
    with pytest.raises(UsageError, match="prefetch is 'never'; give one of ahead, layer"):
        placer.plan("cpu", prefetch="never")


@pytest.mark.parametrize("value", [None, 1])
def test_a_wrong_keyword_is_refused(tmp_path, value):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(TypeError, match="'vram_full' is no option of a Placer; there are device, vram, vram_fill"):
        oallama.Placer.load(path, vram_full=value)


def test_a_context_of_0_is_the_trained_one(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    placer = oallama.Placer.load(path, device="none", n_ctx=0)
    assert placer.workload(1, 1).n_ctx == placer.model.n_ctx_train > 0
