"""Checks weights in the older format of torch, which is a pickle. Imports torch in its function."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from .folder_files import BadFile, check_not_pointer, check_regular, opened, shown
from .weight_headers import weight_map

WHOLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_NAMED = re.compile(
    r"(?i:unsupported global: global|unsupported global|unsupported class) ([\w.]+)"
)
_TAKES = "tensors by name that torch.save wrote"


def check_tensors(folder: Path) -> None:
    """Raise BadFile for a file of pickled weights that holds anything but tensors by their names.

    torch says only for some of them which file it is, and advises to run the code in a pickle.
    """
    import torch

    names = {WHOLE} if (folder / WHOLE).is_file() else set(weight_map(folder, INDEX).values())
    for name in sorted(names):
        check_regular(folder / name)
        with opened(folder / name) as file:
            check_not_pointer(name, file.read(32))
            is_zip = zipfile.is_zipfile(file)
        if is_zip and _is_compressed(folder / name):
            raise BadFile(name, "", _TAKES, "a compressed archive")
        try:
            # "meta": the values are not read, except those of files before torch 1.6.
            found = torch.load(folder / name, map_location="meta", weights_only=True, mmap=is_zip)
        except Exception as error:  # damaged files raise anything
            code = _NAMED.search(str(error))
            got = f"code ({code[1]}), which is not run" if code else "something else"
            raise BadFile(name, "", _TAKES, got) from error
        if not isinstance(found, dict):
            raise BadFile(name, "", _TAKES, shown(type(found).__name__))
        for key, value in found.items():
            if not isinstance(key, str) or not isinstance(value, torch.Tensor):
                raise BadFile(name, str(key)[:80], "a tensor", shown(type(value).__name__))


def _is_compressed(path: Path) -> bool:
    """Whether an archive has parts that can be larger than the file; torch.save writes none."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except zipfile.BadZipFile:
        return False  # torch names the problem
    size = path.stat().st_size
    return any(one.compress_type or one.file_size > size for one in parts)
