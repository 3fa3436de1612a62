"""Protobuf messages as JSON documents, by Python on Spark's executors (a pandas UDF)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from highwater.assets import protobuf_documents
from highwater.assets.protobuf_documents import ProtobufReader
from highwater.protobuf import compile_schema, decode_declared_files

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column

    from highwater.formats import Protobuf
    from highwater.schemas import Schema

_RESULT = "document STRING, problem STRING"


def build_reader_udf(declared: Protobuf, schemas: Mapping[str, Schema] | None) -> Callable[[str, str, str], Column]:
    """A function of Spark that reads messages.

    Args:
        declared: the format.
        schemas: the registry's schemas by ID; None for bare messages of the declared one.

    Returns:
        A function of the columns of the schema's ID, of the message, and of the bytes of a header that say which
        message it is, null where they precede it. The result is a struct of `document`, the message as JSON, and
        `problem`, why there is none; both are null of a record without a value or a schema.
    """
    import pandas as pd
    from pyspark.cloudpickle import register_pickle_by_value
    from pyspark.sql.pandas.functions import pandas_udf

    register_pickle_by_value(protobuf_documents)  # type: ignore[no-untyped-call]
    if schemas is None:
        files = {"declared": decode_declared_files(declared)}
    else:
        files = {one: made for one, schema in schemas.items() if (made := _compile_schema(schema)) is not None}
    read = _build_batch_reader(declared.message, files, framed=schemas is not None)
    # Spark reads the function's input types from them, and our annotations are texts.
    read.__annotations__ = {
        "batches": Iterator[tuple[pd.Series, pd.Series, pd.Series]],
        "return": Iterator[pd.DataFrame],
    }
    found: Callable[[str, str, str], Column] = pandas_udf(read, returnType=_RESULT)  # type: ignore[call-overload]
    return found


def _compile_schema(schema: Schema) -> tuple[bytes, str] | None:
    """The descriptors of a schema; None where it is no Protobuf, so that its records are rejects."""
    try:
        return compile_schema(schema) if schema.kind == "PROTOBUF" else None
    except ValueError:
        return None


def _build_batch_reader(
    message: str, files: Mapping[str, tuple[bytes, str]], *, framed: bool
) -> Callable[[Iterator[tuple[pd.Series, pd.Series, pd.Series]]], Iterator[pd.DataFrame]]:
    made, named = ProtobufReader, ["document", "problem"]

    def read(batches: Iterator[tuple[pd.Series, pd.Series, pd.Series]]) -> Iterator[pd.DataFrame]:
        import pandas as pd

        reader = made(message, files, framed=framed)
        for batch in batches:
            found = [reader.read(*one) for one in zip(*batch, strict=True)]
            # By columns: a list of rows takes pandas longer than reading the messages.
            yield pd.DataFrame({name: [one[at] for one in found] for at, name in enumerate(named)})

    return read
