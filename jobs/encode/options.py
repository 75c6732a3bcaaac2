"""The options of the encode kind and their checks at submission. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ...configs.precision import FORMER_NAMES, NATIVE
from ...configs.queues import INFER
from ..errors import SpecError
from ..relations import GIVEN, Relation, goes_with
from ..spec import Spec, option, path_of

CODE_GRAPH = "code_graph"  # in config.json: the encoder that reads code
FORMATS = (".jsonl", ".npz", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(Spec):
    """Compute embeddings of text or Python code with an encoder model."""

    kind: ClassVar[str] = "encode"
    queue: ClassVar[str] = INFER

    relations: ClassVar[tuple[Relation, ...]] = (goes_with("chains", input=GIVEN),)

    text: tuple[str, ...] = option((), "text to encode; or give input instead", group="data")
    input: str | None = option(
        None,
        "JSONL file of text records, text file (one passage per paragraph), Python file or folder; "
        "the code-graph encoder splits Python into modules, classes and functions",
        group="data",
    )
    output: str | None = option(
        None,
        f"file for the embeddings ({', '.join(FORMATS)}), replaced atomically",
        group="data",
        default_text="few are in the result, many in embeddings.npz of the run directory",
    )
    chains: bool = option(
        False,
        "graph context: the chains of the knowledge graph follow the code, as in training "
        "(code-graph encoder only)",
        group="data",
    )
    max_length: int | None = option(
        None,
        "maximum tokens per passage",
        group="data",
        default_text="the training length of a code-graph encoder, else what the model accepts, "
        "with truncate at most 512",
        minimum=3,
        maximum=2**20,
    )

    truncate: bool = option(
        True,
        "passages of more than max_length tokens are cut, and counted in a warning; otherwise one "
        "ends the job",
        group="data",
    )

    model: str = option("demo", "warm encoder model", group="model")
    pooling: str = option(
        "mean",
        "pooling; mean: over all tokens; cls: the first token",
        group="model",
        choices=("mean", "cls"),
    )
    normalize: bool = option(False, "L2 normalization: every embedding has length 1", group="model")
    dtype: str = option(
        NATIVE,
        "precision of the computation; native: the dtype of the model; int8: W8A8 dynamic "
        "quantization, faster; the result reports its accuracy",
        group="model",
        choices=(NATIVE, "int8"),
        former_names=FORMER_NAMES,
    )
    batch_size: int = option(
        16, "maximum passages per batch", group="model", minimum=1, maximum=4096
    )

    def check(self) -> None:
        super().check()
        if bool(self.text) == (self.input is not None):
            got = "both" if self.text else "neither"
            raise SpecError("text", f"must be given, or else input, got {got}")
        if self.output is not None and Path(self.output).suffix not in FORMATS:
            raise SpecError("output", f"must end in {', '.join(FORMATS)}, got {self.output!r}")

    def located(self, folder: Path) -> Self:
        """Return the spec with paths, relative to `folder`, made absolute.

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
        path = self.output or ""
        if os.path.lexists(path) and not os.path.isfile(path):  # a folder, a pipe, a broken link
            raise SpecError("output", f"must be a file or new, got {path!r}")
        if self.output is not None and not os.access(Path(self.output).parent, os.W_OK):
            raise SpecError("output", f"must be in a folder to write to, got {self.output!r}")
        limit = config.get("max_position_embeddings")
        if limit is not None and (self.max_length or 0) > limit:
            raise SpecError(
                "max_length", f"must be at most {limit} for this model, got {self.max_length}"
            )
