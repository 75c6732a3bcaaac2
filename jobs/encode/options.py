"""The options of the encode kind and their checks at submission. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import orjson

from ...configs.precision import FORMER_NAMES, NATIVE
from ...configs.queues import INFER
from ..errors import SpecError
from ..models.architectures import check_embeds, check_scores
from ..relations import GIVEN, Relation, goes_with, is_in, never_with
from ..spec import Spec, option, path_of
from .modules import AUTO, POOLINGS

CODE_GRAPH = "code_graph"  # in config.json: the encoder that reads code
FORMATS = (".jsonl", ".npz", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(Spec):
    """Compute embeddings of text or Python code with an encoder model, or scores of texts."""

    kind: ClassVar[str] = "encode"
    queue: ClassVar[str] = INFER

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with("chains", input=GIVEN),
        goes_with("passage_length", query=GIVEN),
        never_with("tokens", "chains", "pooling", "normalize", "dimensions", query=GIVEN),
        never_with("dtype", when=is_in("int8"), query=GIVEN),
    )

    text: tuple[str, ...] = option(
        (), "text to encode; or give input or tokens instead", group="data"
    )
    tokens: str = option(
        "", "token ids to encode: JSON list of one list per text, with special tokens", group="data"
    )
    query: str | None = option(
        None,
        "query to score the texts against by a cross-encoder, instead of computing embeddings",
        group="data",
    )
    input: str | None = option(
        None,
        "JSONL file of text records, text file (one passage per paragraph), Python file or folder; "
        "the code-graph encoder splits Python into modules, classes and functions",
        group="data",
    )
    output: str | None = option(
        None,
        f"file for the embeddings or scores ({', '.join(FORMATS)}), replaced atomically",
        group="data",
        default_text="few are in the result, many in embeddings.npz or scores.npz of the run "
        "directory",
    )
    chains: bool = option(
        False,
        "graph context: the chains of the knowledge graph follow the code, as in training "
        "(code-graph encoder only)",
        group="data",
    )
    max_length: int | None = option(
        None,
        "maximum tokens per passage; with query, of the query and a passage together",
        group="data",
        default_text="the training length of a code-graph encoder, or max_seq_length of "
        "sentence-transformers, else what the model accepts, with truncate and without query at "
        "most 512",
        minimum=3,
        maximum=2**20,
    )
    passage_length: int | None = option(
        None,
        "maximum tokens per passage, without the query and special tokens: longer ones are cut, "
        "also without truncate",
        group="data",
        default_text="no limit but max_length",
        minimum=1,
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
        AUTO,
        "pooling; mean: over all tokens; cls: the first token; last: the last token; auto: as "
        "modules.json of the model (sentence-transformers) says, else mean",
        group="model",
        choices=POOLINGS,
    )
    normalize: bool | None = option(
        None,
        "L2 normalization: every embedding has length 1",
        group="model",
        default_text="as modules.json of the model says, else off",
    )
    dimensions: int | None = option(
        None,
        "number of dimensions: embeddings are cut to their first ones (Matryoshka models)",
        group="model",
        default_text="all",
        minimum=1,
        maximum=2**16,
    )
    dtype: str = option(
        NATIVE,
        "precision of the computation; native: the dtype of the model; int8: W8A8 dynamic "
        "quantization, faster; the result reports its accuracy",
        group="model",
        choices=(NATIVE, "int8"),
        names=FORMER_NAMES,
    )
    batch_size: int = option(
        16, "maximum passages per batch", group="model", minimum=1, maximum=4096
    )

    def check(self) -> None:
        super().check()
        given = [name for name in ("text", "input", "tokens") if getattr(self, name)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise SpecError("text", f"must be given, or else input or tokens, got {got}")
        _ = self.token_ids  # raises
        if self.query == "":
            raise SpecError("query", "must be a text that is not empty, got ''")
        if self.output is not None and Path(self.output).suffix not in FORMATS:
            raise SpecError("output", f"must end in {', '.join(FORMATS)}, got {self.output!r}")

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids of `tokens`, a list per text. Raises SpecError."""
        if not self.tokens:
            return []
        takes = "must be a JSON list of lists of token ids, none of them empty"
        try:
            found = orjson.loads(self.tokens)
        except orjson.JSONDecodeError as error:
            raise SpecError("tokens", f"{takes}, got {self.tokens[:60]!r}: {error}") from None
        if not (isinstance(found, list) and found and all(map(_is_ids, found))):
            raise SpecError("tokens", f"{takes}, got {self.tokens[:60]!r}")
        return found

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
        if self.query is None:
            check_embeds(config)
        else:
            check_scores(config)
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
        width = config.get("hidden_size")
        if width is not None and (self.dimensions or 0) > width:
            raise SpecError(
                "dimensions", f"must be at most {width} for this model, got {self.dimensions}"
            )
        limit = config.get("max_position_embeddings")
        if limit is not None and (self.max_length or 0) > limit:
            raise SpecError(
                "max_length", f"must be at most {limit} for this model, got {self.max_length}"
            )


def _is_ids(text: Any) -> bool:
    return isinstance(text, list) and bool(text) and all(map(_is_id, text))


def _is_id(token: Any) -> bool:
    return type(token) is int and 0 <= token < 2**31
