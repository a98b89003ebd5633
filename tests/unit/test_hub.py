"""Models of the Hugging Face hub: which file a name means, and downloads from a hub on 127.0.0.1."""

import json
import shutil
from pathlib import Path

import pytest
from gguf_factory import write_gguf
from hub_server import Hub, serve

from oallama.cli.main import exit_code
from oallama.core.errors import UsageError
from oallama.stores.find import find_model
from oallama.stores.hub_cache import hub_cache
from oallama.stores.hub_name import choose, models, parse_hub_name, quant_of

REPO = "someone/Some-1B-GGUF"


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
    with pytest.raises(ValueError, match="is no model of the hub; write it like USER/REPO"):
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


def test_a_quantisation_that_is_not_there_is_said_with_those_that_are():
    with pytest.raises(UsageError, match="has no Q2_K; there is: BF16, IQ4_XS, Q4_K_M, Q4_K_S, Q8_0"):
        choose(parse_hub_name(f"{REPO}:Q2_K"), FILES)
    with pytest.raises(UsageError, match="has no Q4_K; "):  # no part of another's name
        choose(parse_hub_name(f"{REPO}:Q4_K"), FILES)
    with pytest.raises(UsageError, match="has no GGUF model"):
        choose(parse_hub_name(REPO), ["README.md", "mmproj-m-F16.gguf"])


def test_no_name_leads_out_of_the_repository_and_no_part_is_missing():
    hostile = [
        "../m.gguf",
        "/m.gguf",
        "a/../../m.gguf",
        "a\\..\\m.gguf",
        "m-00001-of-00002.gguf",
        "n-00001-of-99999.gguf",
    ]
    assert models(hostile) == []
    assert quant_of("m-Q4_K_M-00001-of-00003.gguf") == "Q4_K_M"
    assert quant_of("model.gguf") == ""


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
    with serve(Hub({REPO: weights, "a/no-gguf": {"README.md": b""}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def said(capfd, *words):
    """(exit code, stdout, last line of stderr) of a command."""
    code = exit_code(words)
    out, err = capfd.readouterr()
    return code, out.strip(), err.strip().split("\n")[-1]


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
    assert f"{REPO}: there is no such file" in line
    assert f"-hf {REPO} downloads it" in line
    assert hub.asked == []
    assert said(capfd, "inspect", f"hf.co/{REPO}")[0] == 0


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("nobody/nothing", 2, "has no repository nobody/nothing, or it is private"),
        ("a/no-gguf", 2, "a/no-gguf has no GGUF model"),
        (f"{REPO}:Q2_K", 2, f"{REPO} has no Q2_K; there is: F16, Q8_0"),
        ("llama3.2", 2, "`ollama pull llama3.2`"),
        ("a/b/c", 2, "'a/b/c' is no model of the hub"),
    ],
)
def test_what_cannot_be_pulled_is_one_sentence(hub, capfd, name, code, says):
    found, out, line = said(capfd, "pull", name)
    assert (found, out) == (code, "")
    assert line.startswith("oallama: ")
    assert says in line


def test_a_gated_repository_says_what_to_do(hub, capfd):
    hub.gated.add(REPO)
    code, _, line = said(capfd, "pull", REPO)
    assert code == 2
    assert f"accept its terms at {hub.url}/{REPO}" in line


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
