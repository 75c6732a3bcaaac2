"""The options of the encode kind, and what is checked of them at submit. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ...configs.precision import FORMER_NAMES, NATIVE
from ..errors import SpecError
from ..spec import Spec, option, path_of

CODE_GRAPH = "code_graph"  # in config.json: the encoder that reads code
FORMATS = (".jsonl", ".npz", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(Spec):
    """Every option of an encode job."""

    kind: ClassVar[str] = "encode"
    queue: ClassVar[str] = "infer"

    model: str = option("demo", "name of the warm model to encode with, an encoder")
    text: tuple[str, ...] = option((), "what to encode")
    input: str | None = option(
        None,
        "what to encode instead: JSONL file of text rows, text file (paragraphs), Python file or "
        "folder; the code-graph encoder takes each module, class and function of Python code",
    )
    output: str | None = option(
        None,
        f"file for the vectors ({', '.join(FORMATS)}), replaced as a whole; by default few are in "
        "the result and many in embeddings.npz of the run directory",
    )
    pooling: str = option(
        "mean", "mean of all tokens, or the first one (cls)", choices=("mean", "cls")
    )
    normalize: bool = option(False, "make every vector as long as 1")
    chains: bool = option(
        False, "code-graph: let code be followed by its walk through the graph, as in training"
    )
    batch_size: int = option(16, "most passages to compute together", minimum=1, maximum=4096)
    max_length: int | None = option(
        None,
        "tokens after which a passage is cut; by default those that a code-graph encoder was "
        "trained with, else 512 or what the model takes",
        minimum=3,
    )
    dtype: str = option(
        NATIVE,
        "native: the model's own dtype; int8: W8A8 dynamic quantization, faster; the result says "
        "how close its vectors are",
        choices=(NATIVE, "int8"),
        former_names=FORMER_NAMES,
    )

    def check(self) -> None:
        super().check()
        if bool(self.text) == (self.input is not None):
            got = "both" if self.text else "neither"
            raise SpecError("text", f"must be given, or else input, got {got}")
        if self.output is not None and Path(self.output).suffix not in FORMATS:
            raise SpecError("output", f"must end in {', '.join(FORMATS)}, got {self.output!r}")
        if self.chains and self.input is None:
            raise SpecError("chains", "must go with an input of Python code, got text")

    def located(self, folder: Path) -> Self:
        """Return the same spec with its paths seen from `folder` made absolute.

        Raises SpecError.
        """
        names = [name for name in ("input", "output") if getattr(self, name) is not None]
        paths = {name: str(path_of(name, getattr(self, name), folder)) for name in names}
        return replace(self, **paths)  # type: ignore[arg-type]

    def check_inputs(self, model_settings: Mapping[str, Any] | None) -> None:
        """Check the input, the place of the output, and lengths. Raises SpecError."""
        from . import passages

        super().check_inputs(model_settings)
        config = model_settings or {}
        is_code = config.get("model_type") == CODE_GRAPH
        if self.input is not None:
            passages.check(Path(self.input), of_code=is_code)
        if self.chains and config and not (is_code and passages.is_sources(Path(str(self.input)))):
            raise SpecError("chains", "must go with a code-graph encoder and an input of Python")
        if self.output is not None and not os.access(Path(self.output).parent, os.W_OK):
            raise SpecError("output", f"must be in a folder to write to, got {self.output!r}")
        limit = config.get("max_position_embeddings")
        if None not in (self.max_length, limit) and int(str(self.max_length)) > int(str(limit)):
            raise SpecError(
                "max_length", f"must be at most {limit} for this model, got {self.max_length}"
            )
