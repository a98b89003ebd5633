"""Models by name: which file a name of the hub means, downloads from a hub on 127.0.0.1, and what other programs have
downloaded: found, named, and refused where it is broken or leads out of its store."""

import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from gguf_factory import write_gguf
from hub_server import Hub, serve

from oallama.cli.main import exit_code
from oallama.cli.prompt import model_and_prompt
from oallama.core.errors import ModelFileError, UsageError
from oallama.stores.find import find_model
from oallama.stores.hub_cache import hub_cache, llama_cache
from oallama.stores.hub_name import choose, models, parse_hub_name, quant_of

REPO = "someone/Some-1B-GGUF"
TOO_LONG = "n" * 300
"""A name that the system refuses, for whoever asks."""


def said(capfd, *words):
    """(exit code, stdout, last line of stderr) of a command."""
    code = exit_code(words)
    out, err = capfd.readouterr()
    return code, out.strip(), err.strip().split("\n")[-1]


# ---- names of the hub


@pytest.mark.parametrize(
    ("text", "repo", "quant"),
    [
        (REPO, REPO, ""), (f"{REPO}:Q4_K_M", REPO, "Q4_K_M"), (f"hf.co/{REPO}:q8_0", REPO, "q8_0"),
        (f"https://huggingface.co/{REPO}", REPO, ""), ("a/b", "a/b", ""), ("hf.co/hf.co/b", "hf.co/b", ""),
    ],
)  # fmt: skip
def test_a_name_is_read(text, repo, quant):
    name = parse_hub_name(text)
    assert (name.repo, name.quant) == (repo, quant)
    assert parse_hub_name(name.model) == name


@pytest.mark.parametrize(
    "text",
    ["", "model", "a/b/c", "../b", "a/..", "a/b:", "a/b:c:d", "a//b", "/a/b", "a/b c", "a/b:../x", "a--b/c", ".a/b"],
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ValueError, match="is not a hub model; write USER/REPO"):
        parse_hub_name(text)


FILES = ["README.md", "m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf",
         "m-Q4_K_S.gguf", "m-Q8_0.gguf", "mmproj-m-Q4_K_M.gguf", "imatrix-Q4_K_M.gguf"]  # fmt: skip


def without(*names):
    return [file for file in FILES if not any(name in file for name in names)]


@pytest.mark.parametrize(
    ("quant", "files", "chosen"),
    [
        ("", FILES, ("m-Q4_K_M.gguf",)),
        ("", without("Q4_K_M"), ("m-Q8_0.gguf",)),
        ("", without("Q4_K_M", "Q8_0"), ("m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf")),
        ("", without("Q4_K_M", "Q8_0", "BF16"), ("m-IQ4_XS.gguf",)),
        ("q8_0", FILES, ("m-Q8_0.gguf",)),
        ("bf16", FILES, ("m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf")),
        ("Q4_K_S", FILES, ("m-Q4_K_S.gguf",)),
        ("Q6_K", ["Q6_K/m-Q6_K.gguf", "m.Q8_0.gguf"], ("Q6_K/m-Q6_K.gguf",)),
    ],
)
def test_the_file_is_chosen_as_llama_cpp_does(quant, files, chosen):
    assert choose(parse_hub_name(f"{REPO}:{quant}" if quant else REPO), files) == chosen


def test_a_part_of_a_quantisations_name_is_none():
    with pytest.raises(UsageError, match="has no Q4_K; choose from BF16, IQ4_XS, Q4_K_M, Q4_K_S, Q8_0"):
        choose(parse_hub_name(f"{REPO}:Q4_K"), FILES)


def test_no_name_leads_out_of_the_repository_and_no_part_is_missing():
    hostile = ["../m.gguf", "/m.gguf", "a/../../m.gguf", "a\\..\\m.gguf", "\x1b[2Jm.gguf", "a\nb.gguf", "\u202egm.gguf"]
    assert models([*hostile, "m-00001-of-00002.gguf", "n-00001-of-99999.gguf", "o-00001-of-00000.gguf"]) == []
    assert quant_of("m-Q4_K_M-00001-of-00003.gguf") == "Q4_K_M"
    assert quant_of("model.gguf") == ""


def test_each_part_of_many_models_is_looked_at_once():
    """A repository may list as many names as it likes."""
    assert models(f"m{i}-00001-of-99999.gguf" for i in range(50_000)) == []
    whole = [f"m-{i:05d}-of-20000.gguf" for i in range(1, 20_001)]
    assert models(reversed(whole)) == [tuple(whole)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A repository of tiny models: one whole, one in parts."""
    folder = tmp_path_factory.mktemp("repository")
    write_gguf(folder / "m-Q8_0.gguf", "llama", weight_type="Q8_0")
    write_gguf(folder / "m-F16.gguf", "llama", split_max_tensors=12)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sum("-of-" in name for name in files) >= 2
    return files | {"mmproj-m-F16.gguf": b"GGUF", "README.md": b"a model"}


@pytest.fixture
def hub(weights, monkeypatch):
    others = {"a/no-gguf": {"README.md": b"", "mmproj-m-F16.gguf": b"GGUF"}, "a/gated": weights}
    with serve(Hub({REPO: weights, **others}, gated={"a/gated"})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


# ---- downloads


def test_pull_downloads_once_and_prints_the_path(hub, weights, capfd):
    code, path, _ = said(capfd, "pull", REPO)
    assert code == 0
    assert Path(path).read_bytes() == weights["m-Q8_0.gguf"]
    assert str(hub_cache()) in path
    assert [file for file, _ in hub.downloads()] == ["m-Q8_0.gguf"]
    assert said(capfd, "pull", f"hf.co/{REPO}:q8_0")[:2] == (0, path)
    assert len(hub.downloads()) == 1


def test_hf_downloads_what_is_not_there_and_needs_no_network_for_what_is(hub, capfd):
    code, out, _ = said(capfd, "inspect", "-hf", f"{REPO}:Q8_0", "--json")
    assert code == 0
    assert json.loads(out)["model"]["path"].endswith("m-Q8_0.gguf")
    asked = len(hub.asked)
    for words in (["-hf", REPO], [REPO], [f"hf.co/{REPO.lower()}"], ["-m", f"https://huggingface.co/{REPO}"]):
        assert said(capfd, "inspect", *words)[0] == 0
    assert len(hub.asked) == asked


def test_a_name_with_a_host_is_downloaded_and_one_without_is_not(hub, capfd):
    code, _, line = said(capfd, "inspect", REPO)
    assert code == 2
    assert f"{REPO} is neither a GGUF file nor a downloaded model" in line
    assert f"-hf {REPO} downloads it" in line
    assert hub.asked == []
    assert said(capfd, "inspect", f"hf.co/{REPO}")[0] == 0


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("nobody/nothing", 2, "has no repository nobody/nothing, or it is private"),
        ("a/no-gguf", 2, "a/no-gguf has no GGUF model"),
        (f"{REPO}:Q2_K", 2, f"{REPO} has no Q2_K; choose from F16, Q8_0"),
        ("llama3.2", 2, "llama3.2 is neither a GGUF file nor a downloaded model; `-hf USER/REPO` downloads"),
        ("a/b/c", 2, "'a/b/c' is not a hub model"),
        ("a/gated", 2, "accept its terms at HUB/a/gated"),
    ],
)
def test_what_cannot_be_pulled_is_one_sentence(hub, capfd, name, code, says):
    found, out, line = said(capfd, "pull", name)
    assert (found, out) == (code, "")
    assert line.startswith("oallama: ")
    assert says.replace("HUB", hub.url) in line


def test_a_model_of_ollama_by_name_is_told_in_the_same_words_by_every_command(hub, capfd):
    said_by = {words: said(capfd, *words)[2] for words in (("pull", "llama3.2"), ("chat", "llama3.2"))}
    running = said(capfd, "run", "llama3.2")[2]
    assert len(set(said_by.values())) == 1 and running.startswith(said_by["pull", "llama3.2"].rstrip())


@pytest.mark.parametrize("broken", ["no server", "busy", "offline"])
def test_a_hub_that_cannot_be_asked_is_one_sentence_at_once_and_what_is_there_is_used(hub, monkeypatch, capfd, broken):
    _, path, _ = said(capfd, "pull", f"{REPO}:Q8_0")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it tries again"))
    if broken == "no server":
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    elif broken == "busy":
        hub.status = 503
    else:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, line = said(capfd, "pull", "a/gated")
    assert (code, out) == (1, "") and line.startswith("oallama: a/gated is not downloaded: ") and line.count("\n") <= 1
    code, out, line = said(capfd, "pull", REPO)
    assert (code, out) == (0, path) and line.startswith(f"note: using the downloaded {REPO}:Q8_0: ")


def test_a_download_that_stays_cut_is_no_model(hub, weights, monkeypatch, capfd):
    whole = weights["m-Q8_0.gguf"]
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cut_at = len(whole) // 2
    code, out, line = said(capfd, "pull", REPO)
    assert (code, out) == (1, "")
    assert f"the download of {REPO}:Q8_0 from {hub.url} was cut" in line
    assert find_model(REPO) is None
    hub.cut_at = None
    code, path, _ = said(capfd, "pull", REPO)
    assert code == 0
    assert Path(path).read_bytes() == whole


def test_a_disk_without_room_is_said_before_the_download(hub, monkeypatch, capfd):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    code, _, line = said(capfd, "pull", REPO)
    assert code == 1
    assert f"the disk of {hub_cache()} has no room for {REPO}:Q8_0" in line
    assert hub.downloads() == []


@pytest.mark.parametrize("size", ["12", -1, {}])
def test_a_hub_that_tells_sizes_that_are_none_offers_no_model(hub, capfd, size):
    hub.size = size
    code, _, line = said(capfd, "pull", REPO)
    assert code == 2 and "has no GGUF model" in line
    assert hub.downloads() == []


def test_a_cache_that_cannot_be_written_is_said_so(hub, monkeypatch, capfd):
    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(hub_cache()))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refused)
    code, _, line = said(capfd, "pull", REPO)
    assert (code, line) == (1, f"oallama: cannot write to {hub_cache()}; set HF_HUB_CACHE to another folder")


# ---- what other programs have downloaded


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
        path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return path

    def add(self, name, data):
        digest, path = self.blob(data)
        kinds = ("model", "template")
        self.manifest(name, [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": len(data)}
                             for kind in kinds])  # fmt: skip
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


MODEL = "application/vnd.ollama.image.model"
M = "registry.ollama.ai/library/m/latest"


def break_model(store, data, how):
    """Put a model `m` into the store that is broken in this way."""
    digest, blob = store.blob(data)
    layer, outside = {"mediaType": MODEL, "digest": digest, "size": len(data)}, store.folder.parent / "outside"
    manifest = store.manifest(M, [layer, layer] if how == "in two blobs" else [layer])
    if how == "without its blob":
        blob.unlink()
    elif how == "cut":
        blob.write_bytes(data[:100])
    elif how == "another document":
        manifest.write_text('["layers"]')
    elif how == "a digest that leads out":
        outside.write_bytes(data)
        store.manifest(M, [{**layer, "digest": "sha256:../../outside"}])
    elif how == "a link for a blob":
        blob.rename(outside)
        blob.symlink_to(outside)
    elif how == "a link for a manifest":
        manifest.rename(outside)
        manifest.symlink_to(outside)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("without its blob", "is missing"), ("cut", "has another size than its manifest says"),
        ("another document", "is broken"), ("a digest that leads out", "the digest of m:latest is invalid"),
        ("a link for a blob", "is missing from"), ("a link for a manifest", "is not a file in the store"),
        ("in two blobs", "is in 2 blobs"),
    ],
)  # fmt: skip
def test_a_broken_model_of_ollama_is_refused_and_listed_with_the_reason(store, gguf, how, says, capfd):
    break_model(store, gguf, how)
    with pytest.raises(ModelFileError, match=says):
        find_model("m")
    code, _, line = said(capfd, "inspect", "m")
    assert code == 2 and says in line
    code, out, _ = said(capfd, "list", "--json")
    document = json.loads(out)
    assert [(fault["name"], says in fault["why"]) for fault in document["unusable"]] == [("m:latest", True)]
    assert (code, document["models"]) == (0, [])
    assert exit_code(["list"]) == 0 and says in capfd.readouterr().err


def test_a_model_of_ollama_without_a_gguf_is_not_listed(store, capfd):
    store.manifest("registry.ollama.ai/library/m/latest", [{"mediaType": "application/vnd.ollama.image.tensor"}])
    with pytest.raises(ModelFileError, match="is not a GGUF"):
        find_model("m")
    code, out, _ = said(capfd, "list", "--json")
    assert (code, json.loads(out)) == (0, {"models": [], "unusable": []})
    code, out, line = said(capfd, "list")
    assert (code, out) == (0, "") and "no models downloaded; `oallama pull" in line


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


def test_files_of_a_store_that_are_no_models_hold_nothing_up(store, gguf, capfd):
    in_hub_cache("a/b", "1" * 40, "m-Q8_0.gguf", gguf)
    repository = hub_cache() / "models--a--b"
    (repository / "refs" / "main").unlink()
    os.mkfifo(repository / "refs" / "main")
    (repository / "snapshots" / "gone").symlink_to("nowhere")
    folder = repository / "snapshots" / ("1" * 40)
    os.mkfifo(folder / "pipe-Q4_0.gguf")
    (folder / "zero-Q4_0.gguf").symlink_to("/dev/zero")
    (folder / "long-Q4_0.gguf").symlink_to(TOO_LONG)
    (folder / "round").symlink_to(folder)
    llama_cache().mkdir(parents=True)
    (llama_cache() / "self.gguf").symlink_to(llama_cache() / "self.gguf")
    os.mkfifo(llama_cache() / "pipe.gguf")
    code, out, _ = said(capfd, "list", "--json")
    assert (code, [model["name"] for model in json.loads(out)["models"]]) == (0, ["a/b:Q8_0"])


def test_a_snapshot_nested_too_deeply_has_no_models(gguf, capfd):
    in_hub_cache("a/b", "1" * 40, "m-Q8_0.gguf", gguf)
    deep = hub_cache() / "models--c--d" / "snapshots" / ("1" * 40)
    deep.mkdir(parents=True)
    descriptor = os.open(deep, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python recurses, longer than a path may be
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    try:
        code, out, _ = said(capfd, "list", "--json")
    finally:
        subprocess.run(["rm", "-r", deep], check=True)  # shutil recurses too
    assert (code, [model["name"] for model in json.loads(out)["models"]]) == (0, ["a/b:Q8_0"])


@pytest.mark.parametrize("variable", ["OLLAMA_MODELS", "LLAMA_CACHE", "HF_HUB_CACHE"])
def test_a_store_that_may_not_be_looked_at_is_empty(tmp_path, monkeypatch, capfd, variable):
    """Such as that of ollama's service, which only its own user and group may enter."""
    monkeypatch.setenv(variable, str(tmp_path / TOO_LONG))
    code, out, line = said(capfd, "list")
    assert (code, out) == (0, "") and "no models downloaded" in line
    assert find_model("a/b") is None


def test_a_home_of_nobody_is_a_folder_that_is_not_there(monkeypatch, capfd):
    for variable in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HOME"):
        monkeypatch.setenv(variable, "~nobody-of-this-name/x")
    code, out, line = said(capfd, "list")
    assert (code, out) == (0, "") and "no models downloaded" in line


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
    with pytest.raises(UsageError, match=r"`ollama pull llama3`.*; downloaded: llama3\.2:1b, a/b:Q8_0; if it is a"):
        model_and_prompt(["llama3"], None, None)
    with pytest.raises(UsageError, match="-hf c/d-GGUF:Q8_0 downloads it"):
        model_and_prompt(["c/d-GGUF:Q8_0"], None, None)
