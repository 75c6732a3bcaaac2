"""`response_format`: text, any JSON object, or JSON that follows a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from ..core.sampling import Ignored


class TextFormat(BaseModel):
    """Free text (the default)."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A JSON Schema. Decoding always follows it, so `strict` makes no difference."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Ignored = None
    strict: Ignored = None


class SchemaFormat(BaseModel):
    """JSON that follows a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


def schema_of(wanted: TextFormat | ObjectFormat | SchemaFormat | None) -> str:
    """Return the JSON Schema that decoding must follow, as text; "" for free text."""
    if isinstance(wanted, SchemaFormat):
        return orjson.dumps(wanted.json_schema.schema_).decode()
    return '{"type":"object"}' if isinstance(wanted, ObjectFormat) else ""
