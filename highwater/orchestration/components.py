"""Streams as Dagster components, which projects declare in YAML."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import dagster as dg

from highwater.errors import DeclarationError
from highwater.orchestration.build import build_shared_defs, build_stream_defs
from highwater.stream_yaml import FILE, build_stream_model, to_stream

if TYPE_CHECKING:
    from pydantic import BaseModel

    from highwater.declaration import Stream


class StreamComponent(dg.Component):
    """A Kafka topic, ingested into Delta tables slice by slice.

    The attributes are those of `highwater.declaration.Stream`. The first component of a project also brings the
    definitions that all streams share, such as the sensors.

    Args:
        stream: the declaration.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """The attributes in YAML."""
        return build_stream_model()

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """The summary that `dg list components` shows."""
        return dg.ComponentTypeSpec(
            description="A Kafka topic, ingested into Delta tables slice by slice.",
            produces=["asset", "asset_check", "job", "schedule", "sensor", "resource"],
        )

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> StreamComponent:
        """The component of attributes that fit the model.

        Raises:
            DeclarationError: the declaration contradicts itself; the message names the file.
        """
        file = context.path / FILE if context.path.is_dir() else context.path
        if attributes is None:
            raise DeclarationError(
                f"{file} has no attributes", remedy="declare the stream; docs/streams.md has an example"
            )
        try:
            return cls(to_stream(attributes))
        except DeclarationError as error:
            raise DeclarationError(
                f"{file}: {error.problem}", stored=error.stored, found=error.found, remedy=error.remedy
            ) from error

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The stream's assets and checks, and, of the first component, what all streams share."""
        own = build_stream_defs(self.stream)
        every = context.component_tree.get_all_components(of_type=StreamComponent)
        if every and every[0] is not self:
            return own
        streams = [one.stream for one in every] or [self.stream]
        return dg.Definitions.merge(build_shared_defs(streams, environment=os.environ), own)
