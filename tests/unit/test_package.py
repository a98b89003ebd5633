"""What `import oallama` offers, and what its errors say to someone who writes Python."""

import importlib
import traceback

import pytest
from gguf_factory import write_gguf

import oallama
from oallama.core.errors import DoesNotFit, OallamaError, UsageError, in_python


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


def test_messages_name_options_until_a_public_name_is_used():
    error = DoesNotFit(2, 1, "CUDA0")
    assert str(error).endswith("use a shorter context (-c), a smaller -ub, or more --vram")
    assert oallama.DoesNotFit is DoesNotFit
    assert str(error).endswith("use a shorter context (n_ctx), a smaller n_ubatch, or more vram")
    assert "more vram" in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("--vram is negative; give a size", "vram is negative; give a size"),
        ("name one with --device, such as emulated", "name one with device, such as emulated"),
        ("run it with --device none", "run it with device='none'"),
        ("--device emulated:rtx3060,vram=8GiB: wrong", "device='emulated:rtx3060,vram=8GiB': wrong"),
        ("--device 'foo' is no device", "device='foo' is no device"),
        ("--temp -1.5 is no temperature", "temperature=-1.5 is no temperature"),
        ("leave out -fa off, or choose -ctv", "leave out flash_attn='off', or choose type_v"),
        ("lower --vram, -ngl or -c", "lower vram, gpu_layers or n_ctx"),
        ("a well-chosen word, a --b and 2 -c", "a well-chosen word, a --b and 2 n_ctx"),
        ("make a new plan with `oallama plan`", "make a new plan with `placer.plan()`"),
    ],
)
def test_a_message_in_python(message, said):
    assert in_python(message) == said
    assert in_python(said) == said


@pytest.fixture
def placer(tmp_path):
    return oallama.Placer.load(write_gguf(tmp_path / "m.gguf", "llama"), device="none")


@pytest.mark.parametrize("wrong", [{"phase": "deco"}, {"fill": "all"}, {"affinity": "papr"}])
def test_a_wrong_word_is_refused(placer, wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is '{next(iter(wrong.values()))}'; give one of"):
        placer.affinity(**wrong)


def test_a_wrong_prefetch_is_refused(placer):
    with pytest.raises(UsageError, match="prefetch is 'never'; give one of ahead, layer"):
        placer.plan("cpu", prefetch="never")


@pytest.mark.parametrize("value", [None, 1])
def test_a_wrong_keyword_is_refused(tmp_path, value):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(UsageError, match="'vram_full' is no option of a Placer; there are device, vram, vram_fill"):
        oallama.Placer.load(path, vram_full=value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"vram": 6}, "vram: '6' is 6 bytes; write the unit, for example 6GiB"),
        ({"vram": -1}, "vram: '-1' is not a size"),
        ({"vram": [6]}, r"vram is \[6\]; give a whole number"),
        ({"threads": "4"}, "threads is '4'; give a whole number"),
        ({"threads": True}, "threads is True; give a whole number"),
        ({"vram_fill": "0.9"}, "vram_fill is '0.9'; give a number"),
        ({"device": 5}, "device is 5; give a text"),
        ({"n_ctx": 4096.0}, "n_ctx is 4096.0; give a whole number"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path, wrong, said):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(oallama.UsageError, match=f"^{said}"):
        oallama.Placer.load(path, **wrong)


def test_wrong_arguments_are_errors_of_ours(placer):
    with pytest.raises(UsageError, match="the model is of type int; give the path of a GGUF file"):
        oallama.Placer.load(5)
    with pytest.raises(UsageError, match="'cpu' is no Plan; make one with `placer"):
        placer.engine("cpu")
    with pytest.raises(UsageError, match="n_prompt is 'long'; give a whole number"):
        placer.plan("cpu", n_prompt="long")
    with pytest.raises(UsageError, match="n_ctx is 'long'; give a whole number"):
        placer.plan("cpu", n_ctx="long")
    with pytest.raises(UsageError, match="there is no policy 'oatoo'; choose one of auto"):
        placer.plan("oatoo")
    with pytest.raises(UsageError, match="the profile is of type int; give a Profile or the path of one"):
        oallama.Placer.load("m.gguf", profile=5)
    with pytest.raises(UsageError, match="prompt is 5; give a text"):
        placer.run(5)


def test_a_placer_is_shown_in_one_line(placer):
    assert repr(placer) == "<Placer of m.gguf (llama, 2 layers, 2.57 MiB) on none>"


def test_a_context_of_0_is_the_trained_one(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    placer = oallama.Placer.load(path, device="none", n_ctx=0)
    assert placer.workload(1, 1).n_ctx == placer.model.n_ctx_train > 0
