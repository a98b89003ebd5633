"""Downloads models of the Hugging Face hub into huggingface_hub's cache, and reports a failure in one sentence.

Endpoint, token, proxies and cache are huggingface_hub's own: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE, …
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from oallama.core.errors import DownloadError, OallamaError, UsageError
from oallama.core.units import format_bytes
from oallama.stores.hub_cache import STORE, hub_cache
from oallama.stores.hub_name import HubName, choose, quant_of
from oallama.stores.stored import StoredModel

DEFAULT_ENDPOINT = "https://huggingface.co"
ANSWER_S = 10.0  # seconds for the hub to connect, and to answer


@dataclass(frozen=True, slots=True)
class HubFiles:
    """Files of one model to download, in order, with their bytes."""

    name: HubName
    sizes: dict[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes.values())


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def look_up(name: HubName) -> HubFiles:
    """Ask the hub, once, which files a name means. Raises UsageError for an unknown repository or file, DownloadError
    if the hub does not answer."""
    from huggingface_hub import HfApi

    try:  # list_repo_tree would try six times, for 24 s
        repository = HfApi(endpoint=endpoint()).model_info(name.repo, files_metadata=True, timeout=ANSWER_S)
    except Exception as error:  # of any of its HTTP libraries
        raise _failure(error, name) from error
    sizes = {f.rfilename: f.size for f in repository.siblings or () if isinstance(f.size, int) and f.size >= 0}
    files = choose(name, sizes)
    return HubFiles(HubName(name.repo, quant_of(files[0])), {file: sizes[file] for file in files})


def download(wanted: HubFiles) -> StoredModel:
    """Download those of the files that the cache lacks, with huggingface_hub's progress bar. A broken connection is
    resumed, a few times. Raises DownloadError, UsageError."""
    from huggingface_hub import hf_hub_download

    cache = hub_cache()
    _check_room(wanted, cache)
    fetched = []
    for file in wanted.sizes:
        try:
            path = hf_hub_download(wanted.name.repo, file, cache_dir=cache, endpoint=endpoint())
        except Exception as error:  # of any of its HTTP libraries
            raise _failure(error, wanted.name, wanted.n_bytes) from error
        fetched.append(Path(path))
    return StoredModel(str(wanted.name), STORE, tuple(fetched))


def _failure(error: Exception, name: HubName, n_bytes: int = 0) -> OallamaError:
    """Convert an error of huggingface_hub, or of its libraries, to an oallama error."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return UsageError(
            f"{name.repo} is gated: accept its terms at {endpoint()}/{name.repo}, then log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(
            f"{endpoint()} has no repository {name.repo}, or it is private; check the name, or log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    chain = _chain(error)
    if any(getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for cause in chain):
        return _no_room(name, n_bytes, hub_cache())
    answers = [answer for cause in chain if (answer := getattr(cause, "response", None)) is not None]
    if answers:
        return DownloadError(f"{endpoint()} answers {answers[0].status_code} for {name.repo}; try again later")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DownloadError(f"cannot write to {error.filename or hub_cache()}; set HF_HUB_CACHE to another folder")
    why = " ".join(str(chain[-1]).split()) or type(chain[-1]).__name__
    if n_bytes:
        return DownloadError(
            f"the download of {name} from {endpoint()} was cut off ({why}); run the command again to continue"
        )
    return DownloadError(f"cannot reach {endpoint()} ({why}); check the network, or HF_ENDPOINT and your proxy")


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, the first cause last."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _check_room(wanted: HubFiles, cache: Path) -> None:
    """Raise DownloadError if the disk lacks room for the missing files: huggingface_hub only notices a full disk."""
    from huggingface_hub import try_to_load_from_cache

    repo = wanted.name.repo
    cached = [file for file in wanted.sizes if isinstance(try_to_load_from_cache(repo, file, cache_dir=cache), str)]
    missing = wanted.n_bytes - sum(wanted.sizes[file] for file in cached)
    if missing > _free_bytes(cache):
        raise _no_room(wanted.name, missing, cache)


def _no_room(name: HubName, n_bytes: int, cache: Path) -> DownloadError:
    return DownloadError(
        f"the disk of {cache} has no room for {name}: {format_bytes(n_bytes)} needed, "
        f"{format_bytes(_free_bytes(cache))} free; free disk space, or set HF_HUB_CACHE to another folder"
    )


def _free_bytes(cache: Path) -> int:
    folder = next(folder for folder in (cache.absolute(), *cache.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(folder).free
