"""What other programs have downloaded: found, named, and refused where it is broken or leads out of its store."""

import hashlib
import json

import pytest
from gguf_factory import write_gguf

from oallama.cli.main import exit_code
from oallama.cli.prompt import model_and_prompt
from oallama.core.errors import ModelFileError, UsageError
from oallama.stores.find import find_model
from oallama.stores.hub_cache import hub_cache, llama_cache


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return write_gguf(
        tmp_path_factory.mktemp("m") / "m.gguf", "llama", weight_type="Q8_0", metadata={"general.file_type": 7}
    ).read_bytes()


class Store:
    """ollama's, with what a test puts into it."""

    def __init__(self, folder):
        self.folder = folder

    def blob(self, data):
        digest = hashlib.sha256(data).hexdigest()
        path = self.folder / "blobs" / f"sha256-{digest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return f"sha256:{digest}", path

    def manifest(self, name, layers):
        path = self.folder / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}) if not isinstance(layers, str) else layers)
        return path

    def add(self, name, data):
        digest, path = self.blob(data)
        self.manifest(name, [
            {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": len(data)},
            {"mediaType": "application/vnd.ollama.image.template", "digest": digest, "size": len(data)},
        ])  # fmt: skip
        return path


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return Store(tmp_path / "ollama")


def in_hub_cache(repo, commit, file, data, current=True):
    folder = hub_cache() / f"models--{repo.replace('/', '--')}"
    path = folder / "snapshots" / commit / file
    path.parent.mkdir(parents=True, exist_ok=True)
    blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(data)
    path.symlink_to(blob)
    if current:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return path


@pytest.mark.parametrize(
    ("manifest", "names"),
    [
        ("registry.ollama.ai/library/llama3.2/latest", ["llama3.2", "llama3.2:latest", "library/llama3.2", "LLAMA3.2"]),
        ("registry.ollama.ai/library/llama3.2/1b", ["llama3.2:1b", "registry.ollama.ai/library/llama3.2:1b"]),
        ("registry.ollama.ai/someone/m/latest", ["someone/m", "someone/m:latest"]),
        ("hf.co/someone/m-GGUF/Q8_0", ["hf.co/someone/m-GGUF:Q8_0", "hf.co/someone/m-GGUF:q8_0"]),
    ],
)
def test_a_model_of_ollama_is_found_by_its_names(store, gguf, manifest, names):
    blob = store.add(manifest, gguf)
    for name in names:
        found = find_model(name)
        assert found.path == blob, name
        assert found.store == "ollama"
        assert model_and_prompt([name], None, None) == (name, None)
        assert model_and_prompt([name, "hello"], None, None) == (name, "hello")
    for other in ("llama3", "llama3.2:70b", "nobody/m", "hf.co/nobody/m"):
        assert find_model(other) is None


def lacks_its_blob(store, data):
    store.add("registry.ollama.ai/library/m/latest", data).unlink()
    return "is missing"


def is_cut(store, data):
    store.add("registry.ollama.ai/library/m/latest", data).write_bytes(data[:100])
    return "has not the size that its manifest says"


def is_another_document(store, data):
    store.manifest("registry.ollama.ai/library/m/latest", '["layers"]')
    return "is broken"


def leads_out_by_its_digest(store, data):
    (store.folder / "blobs").mkdir(parents=True)
    (store.folder.parent / "outside").write_bytes(data)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../outside", "size": len(data)}
    store.manifest("registry.ollama.ai/library/m/latest", [layer])
    return "the digest of m:latest is none"


def has_a_link_for_a_blob(store, data):
    blob = store.add("registry.ollama.ai/library/m/latest", data)
    outside = store.folder.parent / "outside"
    outside.write_bytes(data)
    blob.unlink()
    blob.symlink_to(outside)
    return "is missing from"


def has_a_link_for_a_manifest(store, data):
    store.add("registry.ollama.ai/library/other/latest", data)
    manifest = store.folder / "manifests" / "registry.ollama.ai" / "library" / "other" / "latest"
    outside = store.folder.parent / "outside"
    manifest.rename(outside)
    link = store.folder / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    link.parent.mkdir()
    link.symlink_to(outside)
    return "is no file of the store"


def is_in_two_blobs(store, data):
    digest, _ = store.blob(data)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": len(data)}
    store.manifest("registry.ollama.ai/library/m/latest", [layer, layer])
    return "is in 2 blobs"


@pytest.mark.parametrize(
    "broken",
    [
        lacks_its_blob, is_cut, is_another_document, leads_out_by_its_digest, has_a_link_for_a_blob,
        has_a_link_for_a_manifest, is_in_two_blobs,
    ],
)  # fmt: skip
def test_a_broken_model_of_ollama_is_refused_and_listed_with_the_reason(store, gguf, broken, capfd):
    says = broken(store, gguf)
    with pytest.raises(ModelFileError, match=says):
        find_model("m")
    assert exit_code(["inspect", "m"]) == 2
    line = capfd.readouterr().err.strip()
    assert says in line
    assert "\n" not in line
    assert exit_code(["list", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [(fault["name"], says in fault["why"]) for fault in document["unusable"]] == [("m:latest", True)]
    assert document["models"] == []
    assert exit_code(["list"]) == 0
    assert says in capfd.readouterr().err


def test_a_model_of_ollama_without_a_gguf_is_not_listed(store, capfd):
    store.manifest("registry.ollama.ai/library/m/latest", [{"mediaType": "application/vnd.ollama.image.tensor"}])
    with pytest.raises(ModelFileError, match="is no GGUF"):
        find_model("m")
    assert exit_code(["list", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"models": [], "unusable": []}


def test_every_store_is_listed(store, gguf, capfd):
    blob = store.add("registry.ollama.ai/library/m/1b", gguf)
    cached = in_hub_cache("someone/m-GGUF", "c" * 40, "m-Q8_0.gguf", gguf)
    in_hub_cache("someone/m-GGUF", "c" * 40, "mmproj-m-F16.gguf", gguf)
    in_hub_cache("someone/m-GGUF", "c" * 40, "m-F16-00001-of-00002.gguf", gguf)
    llama_cache().mkdir()
    flat = llama_cache() / "someone_n-GGUF_n-Q8_0.gguf"
    flat.write_bytes(gguf)
    (llama_cache() / "broken.gguf").write_bytes(b"GGUF")
    assert exit_code(["list", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [(m["name"], m["store"], m["bytes"], m["quantisation"], m["path"]) for m in document["models"]] == [
        ("someone/m-GGUF:Q8_0", "Hugging Face", len(gguf), "Q8_0", str(cached)),
        ("someone_n-GGUF_n-Q8_0", "llama.cpp", len(gguf), "Q8_0", str(flat)),
        ("m:1b", "ollama", len(gguf), "Q8_0", str(blob)),
    ]
    assert [fault["name"] for fault in document["unusable"]] == ["broken"]
    for model in document["models"]:
        assert str(find_model(model["name"]).path) == model["path"]
    assert exit_code(["list"]) == 0
    out = capfd.readouterr().out
    assert "someone/m-GGUF:Q8_0" in out
    assert str(blob) in out


def test_without_models_that_is_said(capfd):
    assert exit_code(["list"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "no model has been downloaded; `oallama pull" in err


def test_of_several_commits_the_current_one_counts_then_the_newest(gguf):
    in_hub_cache("a/b", "1" * 40, "m-Q8_0.gguf", gguf)
    in_hub_cache("a/b", "2" * 40, "m-Q4_0.gguf", gguf, current=False)
    current = in_hub_cache("a/b", "3" * 40, "m-Q8_0.gguf", gguf)
    assert find_model("a/b").path == current
    assert "2" * 40 in str(find_model("hf.co/a/b:q4_0").path)
    assert find_model("a/b:Q2_K") is None


@pytest.mark.parametrize(
    "word", ["a\0b", "x" * 5000, "..", "../../etc/passwd", "", ":", "/", "a/b/c/d/e", "Hello", "~"]
)
def test_words_that_name_nothing_find_nothing(store, gguf, word):
    store.add("registry.ollama.ai/library/m/latest", gguf)
    in_hub_cache("a/b", "1" * 40, "m-Q8_0.gguf", gguf)
    assert find_model(word) is None


def test_downloaded_models_are_named_where_a_word_is_none(store, gguf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.add("registry.ollama.ai/library/llama3.2/1b", gguf)
    in_hub_cache("a/b", "1" * 40, "m-Q8_0.gguf", gguf)
    with pytest.raises(UsageError, match=r"there is no GGUF file near by; downloaded: llama3\.2:1b, a/b:Q8_0"):
        model_and_prompt(["llama3"], None, None)
    with pytest.raises(UsageError, match="-hf c/d-GGUF:Q8_0 downloads it"):
        model_and_prompt(["c/d-GGUF:Q8_0"], None, None)
