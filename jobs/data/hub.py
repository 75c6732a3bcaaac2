"""Hub data sets on this machine: the files of one split, found by the library `datasets`.

A data set is a folder: a copy of its repository, one written by `save_to_disk`, or one that
`load_dataset` has prepared. Imported only if a source names one: importing `datasets` takes 0.5 s.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from ..errors import SpecError
from ..files import jsonl
from ..files.folders import files_in, has_suffix

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")  # of files that are read
_DICT, _INFO, _STATE = "dataset_dict.json", "dataset_info.json", "state.json"
# The files of `datasets` that mark a data set: what each lists, and as what.
_INDEXES: Mapping[str, tuple[str, type]] = {
    _DICT: ("splits", list),
    _INFO: ("splits", dict),
    _STATE: ("_data_files", list),
}
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

# The description of splits in the YAML at the start of a README.
_CARD = re.compile(r"---\n(?:(?!---).*\n)*?(?:configs|dataset_info):")
_LONGEST_CARD = 1_000_000  # characters
_ANSWER_S = 10.0  # for the hub to answer one request


@dataclass(frozen=True)
class Name:
    """A hub data set as an option names it: `owner/name:config:split`, or a folder as its name."""

    name: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> Name:
        """Read a name; config and split may be empty or absent."""
        name, config, split = (*text.split(":", 2), "", "")[:3]
        return cls(name, config or None, split or None)

    def __str__(self) -> str:
        return f"{self.name}:{self.config or ''}:{self.split or ''}"

    @property
    def is_id(self) -> bool:
        """Whether the name can be an id on the hub; one with the suffix of a data file cannot."""
        return _ID.fullmatch(self.name) is not None and not has_suffix(Path(self.name), SUFFIXES)


def is_hub_folder(option: str, folder: Path) -> bool:
    """Whether a folder is marked as a hub data set: one with splits, not only files.

    Other trainers also write files of the names that mark one. Raises SpecError for one that is
    not JSON: without it, the records of all splits would be read as one.
    """
    if any(_index(option, folder, name) is not None for name in _INDEXES):
        return True
    try:
        with (folder / "README.md").open(encoding="utf-8") as file:
            return _CARD.match(file.read(_LONGEST_CARD)) is not None
    except (OSError, UnicodeDecodeError):
        return False


def local_copy(option: str, wanted: Name) -> Path:
    """Return the folder with a data set of the hub: of the caches, or as `datasets` downloads it.

    Raises SpecError with advice if it is not available.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(wanted.name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return _prepared(option, wanted)
    # For a prepared data set, this cache may have only the description.
    has_data = bool(files_in(folder, SUFFIXES).files)
    return folder if has_data else _prepared(option, wanted)


def _prepared(option: str, wanted: Name) -> Path:
    import datasets

    try:
        with _offline_if_unreachable(wanted.name):
            loaded: Any = datasets.load_dataset(wanted.name, wanted.config)
        return Path(next(iter(loaded.values())).cache_files[0]["filename"]).parent
    except Exception as error:  # errors of the network, the hub and the data have dozens of types
        raise SpecError(
            option,
            f"must be a hub data set on this machine, got {jsonl.shown(wanted.name)}: "
            f"{_first_line(error)}; where the hub can be reached, run: "
            f"hf download {wanted.name} --repo-type dataset",
        ) from None


@contextmanager
def _offline_if_unreachable(name: str) -> Iterator[None]:
    """Make `datasets` read only its cache if the hub does not answer one request.

    Otherwise it retries for 23 seconds.
    """
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(name, timeout=_ANSWER_S)
    except HfHubHTTPError:
        pass  # the hub is reachable; `datasets` reports its error
    except Exception:  # errors of the network have dozens of types
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def split_files(option: str, wanted: Name) -> list[Path]:
    """Return the files of the split of a data set in a folder. Raises SpecError."""
    folder = Path(wanted.name)
    if any(_index(option, folder, name) is not None for name in (_DICT, _STATE)):
        found = _saved(option, folder)
    elif (info := _index(option, folder, _INFO)) is not None:
        found = _prepared_splits(folder, info)
    else:
        found = _repository(option, wanted, folder)
    files = found[_chosen(option, wanted, "split", found, wanted.split)]()
    for path in files:
        if not has_suffix(path, SUFFIXES):
            raise _fault(option, wanted, f"files of {', '.join(SUFFIXES)}", path.name)
    return files


Splits = Mapping[str, Callable[[], list[Path]]]  # the files of each split, found when needed


def _index(option: str, folder: Path, name: str) -> Any:
    """Return the splits or files that a file of `datasets` lists; None if it is not of `datasets`.

    Raises SpecError for a file that is not JSON.
    """
    path = folder / name
    if not path.is_file():
        return None
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SpecError(option, f"{jsonl.shown(path)}: must be JSON, got: {error}") from None
    key, kind = _INDEXES[name]
    found = document.get(key) if isinstance(document, dict) else None
    return found if isinstance(found, kind) and found else None


def _saved(option: str, folder: Path) -> Splits:
    """Return the splits of `save_to_disk`: folders with a state.json, or the folder itself."""

    def files(inside: Path) -> list[Path]:
        found = _index(option, inside, _STATE) or []
        names: list[Any] = [file.get("filename") for file in found if isinstance(file, dict)]
        if not names or not all(
            isinstance(name, str) and Path(name).name == name for name in names
        ):
            raise SpecError(option, f"{jsonl.shown(inside / _STATE)}: must list its data files")
        return [inside / name for name in names]

    if _index(option, folder, _STATE) is not None:
        return {"all": partial(files, folder)}
    splits = [str(name) for name in _index(option, folder, _DICT) or ()]
    return {name: partial(files, folder / name) for name in splits}


def _prepared_splits(folder: Path, names: Mapping[str, Any]) -> Splits:
    """Return the splits in a folder of the cache of `load_dataset`."""

    def files(split: str) -> list[Path]:
        whole = sorted(folder.glob(f"*-{split}.arrow"))
        return whole or sorted(folder.glob(f"*-{split}-[0-9]*-of-[0-9]*.arrow"))

    return {name: partial(files, name) for name in names}


def _repository(option: str, wanted: Name, folder: Path) -> Splits:
    """Return the splits of a copy of a repository, as its README or its file names divide it."""
    import datasets

    with tempfile.TemporaryDirectory() as cache:
        try:
            configs = datasets.get_dataset_config_names(str(folder))
            config = _chosen(option, wanted, "config", configs, wanted.config)
            builder: Any = datasets.load_dataset_builder(str(folder), config, cache_dir=cache)
            found = dict(builder.config.data_files or {})
        except SpecError:
            raise
        except Exception as error:  # errors in README or file names have dozens of types
            raise _fault(
                option, wanted, "a folder that datasets can load", _first_line(error)
            ) from None
    for path in (Path(path) for files in found.values() for path in files):
        if not Path(os.path.normpath(path)).is_relative_to(folder.resolve()):
            raise _fault(option, wanted, "a data set with its files in its folder", str(path))
    return {str(split): partial(_paths, files) for split, files in found.items()}


def _paths(texts: Iterable[str]) -> list[Path]:
    return [Path(text) for text in texts]


def _chosen(option: str, wanted: Name, what: str, names: Iterable[str], name: str | None) -> str:
    """Return the config or split that is wanted, or else the only one. Raises SpecError."""
    known = list(names)
    if name in known:
        return str(name)
    if name is None and len(known) == 1:
        return known[0]
    raise _fault(
        option, wanted, f"NAME:CONFIG:SPLIT with a {what} of {', '.join(known)}", name or "none"
    )


def _fault(option: str, wanted: Name, takes: str, got: str) -> SpecError:
    name = jsonl.shown(str(wanted).rstrip(":"))
    return SpecError(option, f"{name}: must be {takes}, got {got[:200]}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
