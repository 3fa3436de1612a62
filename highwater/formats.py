"""The formats of record values and keys: which bytes a topic's producers write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Json:
    """A JSON document in UTF-8.

    Args:
        registry: the value has the framing of a schema registry: a magic byte and the schema's ID before the document,
            or the ID in the header `__value_schema_id`. The registry must know the ID. The header of a key is
            `__key_schema_id`.
    """

    registry: bool = False


@dataclass(frozen=True)
class Avro:
    """A record in Avro's binary encoding, by its writer's schema; a key may have any other type of Avro too.

    Args:
        schema: the writer's schema as JSON, for bare values; None for values with the framing of a schema registry,
            which has the schemas.
    """

    schema: str | None = None

    @property
    def registry(self) -> bool:
        """Whether the schemas come from a registry."""
        return self.schema is None


@dataclass(frozen=True)
class Protobuf:
    """A Protobuf message.

    Args:
        message: the full name of the message, such as `shop.v1.Order`; with a registry it may be empty: the framing
            says which message of the schema it is.
        descriptors: for bare messages a `FileDescriptorSet` in base64, with all imports (`protoc
            --include_imports --descriptor_set_out`); None for values with the framing of a schema registry.
    """

    message: str = ""
    descriptors: str | None = None

    @property
    def registry(self) -> bool:
        """Whether the schemas come from a registry."""
        return self.descriptors is None


@dataclass(frozen=True)
class Csv:
    """One line of separated values in UTF-8; a field's source is the name of its column.

    Args:
        columns: the names of the columns, in their order.
        delimiter: the character between two values.
        quote: the character around values that hold the delimiter; doubled inside of them.
        null: the text that means null, with quotes or without; None if no text does.
    """

    columns: tuple[str, ...]
    delimiter: str = ","
    quote: str = '"'
    null: str | None = ""


@dataclass(frozen=True)
class Lines:
    """A line of text in UTF-8; a field's source is the name of a group.

    Args:
        pattern: a regular expression with named groups, which must match the whole line; of the syntax that Python and
            Java share. A group that matches nothing, or no character, is absent.
    """

    pattern: str


@dataclass(frozen=True)
class Raw:
    """Any bytes, which are not parsed: fields come from the key, headers and what Kafka says of the record.

    A field with the source `value` has the whole value: of type `binary` its bytes, of type `string` its text in UTF-8.
    In a key, `Key()` gives its bytes.
    """


@dataclass(frozen=True)
class Text:
    """A key that is text in UTF-8."""


@dataclass(frozen=True)
class BigEndian:
    """A key that is a signed integer, the highest byte first.

    Args:
        size: how many bytes it has: 8 from Kafka's LongSerializer, 4 from its IntegerSerializer.
    """

    size: Literal[4, 8] = 8


Format = Json | Avro | Protobuf | Csv | Lines | Raw
KeyFormat = Text | BigEndian | Json | Avro | Protobuf | Raw
