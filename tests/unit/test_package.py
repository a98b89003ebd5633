"""What `import oallama` offers, and what its errors say to someone who writes Python."""

import importlib
import pydoc
from types import SimpleNamespace

import pytest
from gguf_factory import write_gguf

import oallama
from oallama.core.errors import DoesNotFit, OallamaError, UsageError


def test_public_names_are_listed_and_there():
    assert set(oallama.__all__) <= set(dir(oallama))
    assert all(getattr(oallama, name) is not None for name in oallama.__all__)
    errors = importlib.import_module("oallama.core.errors")
    every = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, OallamaError)}
    assert every == set(oallama.ERRORS) <= set(dir(oallama))
    assert all(getattr(oallama, name) is getattr(errors, name) for name in oallama.ERRORS)
    assert oallama.DoesNotFit is oallama.errors.DoesNotFit is DoesNotFit
    with pytest.raises(AttributeError, match="no attribute 'Plaser'"):
        _ = oallama.Plaser


def test_help_begins_with_what_one_needs():
    from oallama import Engine, Generation  # as written in the documentation

    said = pydoc.render_doc(oallama, renderer=pydoc.plaintext)
    assert Engine.__name__ in said and Generation.__name__ in said
    assert said.index("Placer.load(") < said.index("CLASSES") and "class BridgeError" not in said


def test_a_placer_takes_the_names_that_the_command_line_takes(model, monkeypatch):
    stored = SimpleNamespace(path=model)
    monkeypatch.setattr("oallama.stores.find.find_model", lambda text: stored if text == "some:1b" else None)
    assert oallama.Placer.load("some:1b", device="none").model.path == str(model)
    monkeypatch.setattr("oallama.stores.hub.look_up", lambda name: name)
    monkeypatch.setattr("oallama.stores.hub.download", lambda name: stored if str(name) == "a/b:Q8_0" else None)
    assert oallama.Placer.load("hf.co/a/b:Q8_0", device="none").model.path == str(model)
    with pytest.raises(oallama.ModelFileError, match="nothing is neither a GGUF file nor a downloaded model"):
        oallama.Placer.load("nothing")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "m.gguf", "llama")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda placer: placer.affinity(phase="deco"), "unknown phase 'deco'; choose from"),
        (lambda placer: placer.affinity(fill="all"), "unknown fill 'all'; choose from"),
        (lambda placer: placer.affinity(affinity="papr"), "unknown affinity 'papr'; choose from"),
        (lambda placer: placer.plan("cpu", prefetch="never"), "unknown prefetch 'never'; choose from ahead, layer"),
        (lambda placer: placer.plan("cpu", n_prompt="long"), "n_prompt must be a whole number"),
        (lambda placer: placer.plan("cpu", n_ctx="long"), "n_ctx must be a whole number"),
        (lambda placer: placer.plan("oatoo"), "unknown policy 'oatoo'; choose from auto"),
        (lambda placer: placer.engine("cpu"), "'cpu' is not a valid plan; make a plan with `placer"),
        (lambda placer: placer.run(5), "prompt must be a string"),
        (lambda placer: placer.load(5), "the model must be the path of a GGUF file, not int"),
        (
            lambda placer: placer.load("m.gguf", profile=5),
            "the profile must be a Profile or its path, not int",
        ),
    ],
)
def test_a_wrong_argument_is_refused(model, wrong, said):
    with pytest.raises(UsageError, match=f"^{said}"):
        wrong(oallama.Placer.load(model, device="none"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"vram": 6}, "--vram: '6' is 6 bytes; write the unit, e.g. 6GiB"),
        ({"vram": -1}, "--vram: '-1' is not a size"),
        ({"vram": [6]}, r"vram must be a whole number"),
        ({"threads": "4"}, "threads must be a whole number"),
        ({"threads": True}, "threads must be a whole number"),
        ({"vram_fill": "0.9"}, "vram_fill must be a number"),
        ({"device": 5}, "device must be a string"),
        ({"n_ctx": 4096.0}, "n_ctx must be a whole number"),
        ({"vram_full": None}, "unknown Placer option 'vram_full'; choose from device, vram, vram_fill"),
        ({"vram_full": 1}, "unknown Placer option 'vram_full'; choose from device, vram, vram_fill"),
    ],
)
def test_a_wrong_option_is_refused(model, wrong, said):
    with pytest.raises(oallama.UsageError, match=f"^{said}"):
        oallama.Placer.load(model, **wrong)


def test_a_placer_is_shown_in_one_line_and_a_context_of_0_is_the_trained_one(model):
    placer = oallama.Placer.load(model, device="none", n_ctx=0)
    assert repr(placer) == "<Placer of m.gguf (llama, 2 layers, 2.57 MiB) on none>"
    assert placer.workload(1, 1).n_ctx == placer.model.n_ctx_train > 0
