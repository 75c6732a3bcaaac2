"""`response_format`: an answer that is text, any JSON object, or JSON by a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from ..core.sampling import Forgotten


class TextFormat(BaseModel):
    """Text, which is the default."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ObjectFormat(BaseModel):
    """Some JSON object."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A JSON Schema. The answer keeps to it whether or not `strict` is asked for."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Forgotten = None
    strict: Forgotten = None


class SchemaFormat(BaseModel):
    """JSON that keeps to a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


def schema_of(wanted: TextFormat | ObjectFormat | SchemaFormat | None) -> str:
    """Return the text of the JSON Schema that the answer keeps to; none where it is free."""
    if isinstance(wanted, SchemaFormat):
        return orjson.dumps(wanted.json_schema.schema_).decode()
    return '{"type":"object"}' if isinstance(wanted, ObjectFormat) else ""
