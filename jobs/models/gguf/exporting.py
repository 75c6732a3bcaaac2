"""Exports a model or an adapter to a folder: the GGUF file, and a Modelfile for Ollama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import SpecError
from ...files.atomic import fsync
from ..adapters import is_adapter, model_folder
from ..tokenizer_folder import TokenizerFolder
from .ollama import modelfile
from .writing import Written, check_installed, write_adapter, write_model

MODELFILE = "Modelfile"


def export(
    folder: Path,
    dest: Path,
    kind: str,
    *,
    name: str,
    on_bytes: Callable[[int], None] | None = None,
) -> Written:
    """Write what is in `folder` to the folder `dest`, as `writing.write_model` or `write_adapter`.

    The files are model-KIND.gguf or adapter-KIND.gguf, and a Modelfile. Raises SpecError.
    """
    check_installed()
    if is_adapter(folder):
        try:
            base = model_folder(folder)
        except ValueError as error:
            raise SpecError("gguf", f"needs the adapter's base: {error}") from error
        file = dest / f"adapter-{kind}.gguf"
        written = write_adapter(folder, base, file, kind, name=name)
        source = f"FROM {base}\nADAPTER ./{file.name}"
    else:
        base = folder
        file = dest / f"model-{kind}.gguf"
        written = write_model(folder, file, kind, name=name, on_bytes=on_bytes)
        source = f"FROM ./{file.name}"
    tokenizer = TokenizerFolder(folder if (folder / "tokenizer.json").is_file() else base)
    special = tokenizer.special_tokens()
    ends = [special["eos_token"]] if "eos_token" in special else []
    text = modelfile(source, tokenizer.chat_template(), ends, special.get("bos_token"))
    (dest / MODELFILE).write_text(text)  # with the umask of the user, as all of an export
    fsync(dest / MODELFILE)
    return written
