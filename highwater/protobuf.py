"""Protobuf schemas compiled into descriptors."""

from __future__ import annotations

import base64
import tempfile
from functools import lru_cache
from pathlib import Path

from highwater.formats import Protobuf
from highwater.schemas import Schema

_MAIN = "highwater_main.proto"


def decode_declared_files(declared: Protobuf) -> tuple[bytes, str]:
    """The `FileDescriptorSet` of a declared format in bytes, and the name of its last file, which is the main one."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    data = base64.b64decode(declared.descriptors or "")
    return data, FileDescriptorSet.FromString(data).file[-1].name


def compile_schema(schema: Schema) -> tuple[bytes, str]:
    """The `FileDescriptorSet` of a registry's schema, which is text, and the name of its last file.

    Raises:
        ValueError: the text, or what it imports, is no Protobuf schema.
    """
    if schema.kind != "PROTOBUF":
        raise ValueError(f"a schema of the kind {schema.kind}")
    return _compile_text(schema.text, tuple((one.name, one.text) for one in schema.references))


@lru_cache(maxsize=256)
def _compile_text(text: str, imports: tuple[tuple[str, str], ...]) -> tuple[bytes, str]:
    from importlib.resources import files

    from grpc_tools import protoc

    with tempfile.TemporaryDirectory(prefix="highwater-protobuf-") as folder:
        for name, content in ((_MAIN, text), *imports):
            path = Path(folder, name)
            if not path.resolve().is_relative_to(Path(folder).resolve()):
                raise ValueError(f"an import lies outside of the schema's folder: {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        out = Path(folder, "out.binpb")
        known = str(files("grpc_tools") / "_proto")
        arguments = ["", f"-I{folder}", f"-I{known}", "--include_imports", f"--descriptor_set_out={out}", _MAIN]
        if protoc.main(arguments):
            raise ValueError("protoc cannot compile the schema")
        return out.read_bytes(), _MAIN
