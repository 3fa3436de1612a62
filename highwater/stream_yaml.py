"""Streams declared in YAML: the schema follows from the dataclasses of the declaration."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag, ValidationError, create_model
from pydantic import Field as Member
from yaml.constructor import ConstructorError

from highwater.declaration import Stream
from highwater.errors import DeclarationError

# Value of `type` in a document: Dagster loads this class from it.
TYPE = "highwater.orchestration.components.StreamComponent"
# The name of Dagster's files of components.
FILE = "defs.yaml"

_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
# The tag of a union's members that are no dataclass.
_PLAIN = "plain"


class _Loader(yaml.SafeLoader):
    """A loader that refuses a mapping with a key twice; PyYAML takes the last one and reports nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """The mapping of a node.

        Raises:
            ConstructorError: a key is there twice.
        """
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Model(BaseModel):
    """The attributes of one dataclass, by its fields' names."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, frozen=True)
    declares: typing.ClassVar[type]


class _Choice(BaseModel):
    """One dataclass of several, as an object with its name as the only member."""

    model_config = ConfigDict(extra="forbid")


def build_stream_model() -> type[BaseModel]:
    """The attributes of a stream as a Pydantic model."""
    return _Models().build_model(Stream)


def to_stream(attributes: BaseModel) -> Stream:
    """The stream that validated attributes declare.

    Raises:
        DeclarationError: the declaration contradicts itself.
    """
    stream = _build_dataclass(attributes)
    assert isinstance(stream, Stream)
    return stream


def load_yaml(file: Path) -> list[Stream]:
    """The streams of a file; documents of other types are left out.

    Raises:
        DeclarationError: the file is no YAML, or attributes cannot be used. The message names the file and the field.
    """
    try:
        documents = [one for one in yaml.load_all(file.read_text(), _Loader) if isinstance(one, dict)]
    except (OSError, yaml.YAMLError) as error:
        raise DeclarationError(
            f"{file} cannot be read as YAML", found=str(error), remedy="fix the file, or take it out of the folder"
        ) from error
    return [_build_stream(file, one.get("attributes") or {}) for one in documents if one.get("type") == TYPE]


def _build_stream(file: Path, attributes: Any) -> Stream:
    try:
        return to_stream(build_stream_model().model_validate(attributes))
    except ValidationError as error:
        first, *others = error.errors()
        more = f", and {len(others)} more" if others else ""
        raise DeclarationError(
            f"{file}: {_format_path(first['loc'])}: {first['msg']}{more}",
            found=repr(first["input"])[:200],
            remedy="fix the attribute; docs/streams.md lists what a declaration may say",
        ) from error
    except DeclarationError as error:
        raise DeclarationError(
            f"{file}: {error.problem}", stored=error.stored, found=error.found, remedy=error.remedy
        ) from error


def _format_path(location: tuple[int | str, ...]) -> str:
    """A place in the attributes, without the steps that only the model has."""
    steps: list[int | str] = ["attributes"]
    for step in location:
        if step not in {_PLAIN, steps[-1]}:
            steps.append(step)
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in steps).removeprefix(".")


def _build_dataclass(value: Any) -> Any:
    """The dataclass that a model's values declare; only what was given is passed, so defaults are the dataclass's."""
    if isinstance(value, _Choice):
        [inner] = (getattr(value, name) for name in type(value).model_fields)
        return _build_dataclass(inner)
    if isinstance(value, _Model):
        given = {type(value).model_fields[name].alias: getattr(value, name) for name in value.model_fields_set}
        return value.declares(**{str(name): _build_dataclass(one) for name, one in given.items()})
    if isinstance(value, tuple):
        return tuple(map(_build_dataclass, value))
    return {key: _build_dataclass(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _to_snake_case(cls: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


def _parse_duration(value: object) -> object:
    """A number with a unit, `90s` or `7d`, as a duration; anything else as it is."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return timedelta(seconds=int(found[1]) * _SECONDS[found[2]]) if found else value


def _combine_types(types: list[Any]) -> Any:
    return Union[tuple(types)]  # noqa: UP007 - of a list


class _Models:
    """The models of dataclasses, each made once; one that holds itself refers to its own name."""

    def __init__(self) -> None:
        self._made: dict[type, type[BaseModel]] = {}
        self._under_way: set[type] = set()

    def build_model(self, cls: type) -> type[BaseModel]:
        if cls in self._made:
            return self._made[cls]
        self._under_way.add(cls)
        hints = typing.get_type_hints(cls)
        members: dict[str, Any] = {}
        for one in dataclasses.fields(cls):
            if one.metadata.get("internal"):
                continue
            required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
            # Pydantic's own names, such as `schema`, are taken: so each name is an alias.
            default = Member(..., alias=one.name) if required else Member(None, alias=one.name)
            members[f"{one.name}_"] = (self._build_type(hints[one.name]), default)
        name = f"{cls.__name__}Attributes"
        model = create_model(name, __base__=_Model, __doc__=cls.__doc__, **members)
        model.declares = cls
        self._under_way.discard(cls)
        self._made[cls] = model
        model.model_rebuild(_types_namespace={name: model})
        return model

    def _build_type(self, hint: Any) -> Any:
        """A type of a dataclass's field as a type of a model's."""
        if hint is timedelta:
            return Annotated[timedelta, BeforeValidator(_parse_duration)]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return ForwardRef(f"{hint.__name__}Attributes") if hint in self._under_way else self.build_model(hint)
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in {Union, types.UnionType}:
            return self._build_union(arguments)
        if origin is None or origin is Literal:
            return hint
        if origin is tuple and len({*arguments}) == 1:
            # Dagster's sample of the attributes needs the type of an array's items, which the schema of a pair lacks.
            length = Member(min_length=len(arguments), max_length=len(arguments))
            return Annotated[origin[self._build_type(arguments[0]), ...], length]
        return origin[tuple(one if one is Ellipsis else self._build_type(one) for one in arguments)]

    def _build_union(self, arguments: tuple[Any, ...]) -> Any:
        classes = [one for one in arguments if isinstance(one, type) and dataclasses.is_dataclass(one)]
        others = [self._build_type(one) for one in arguments if one not in classes and one is not type(None)]
        # `X | None` and unions without a dataclass need no tag.
        chosen = (
            self._build_tagged_union(classes, others)
            if classes[1:] or (classes and others)
            else self._build_plain_union(classes, others)
        )
        return _combine_types([chosen, None]) if type(None) in arguments else chosen

    def _build_plain_union(self, classes: list[type], others: list[Any]) -> Any:
        plain = _combine_types([*map(self._build_type, classes), *others])
        # A text that is a member of an enumeration becomes that member.
        enums = any(isinstance(one, type) and issubclass(one, Enum) for one in others)
        return Annotated[plain, Member(union_mode="left_to_right")] if enums and others[1:] else plain

    def _build_tagged_union(self, classes: list[type], others: list[Any]) -> Any:
        choices: list[Any] = [
            Annotated[self._build_choice(one, alone=not classes[1:]), Tag(_to_snake_case(one))] for one in classes
        ]
        if others:
            choices.append(Annotated[_combine_types(others), Tag(_PLAIN)])
        names = ", ".join(map(_to_snake_case, classes))
        found = Discriminator(
            _build_discriminator(classes, texts=str in others),
            custom_error_type="no_choice",
            custom_error_message=f"write one of {names}, with its attributes below it",
        )
        return Annotated[_combine_types(choices), found]

    def _build_choice(self, cls: type, *, alone: bool) -> Any:
        """One dataclass of a union: as it is if it is the only one, else under its name."""
        if alone:
            return self._build_type(cls)
        name, empty = _to_snake_case(cls), BeforeValidator(lambda given: {} if given is None else given)
        members: dict[str, Any] = {f"{name}_": (Annotated[self._build_type(cls), empty], Member(..., alias=name))}
        wrapper = create_model(f"{cls.__name__}Choice", __base__=_Choice, **members)
        return Annotated[wrapper, BeforeValidator(lambda given: {given: {}} if isinstance(given, str) else given)]


def _build_discriminator(classes: list[type], *, texts: bool) -> Callable[[Any], str | None]:
    """The name that finds the member of a union: the only name in an object, or a bare one where texts mean nothing."""
    names = [_to_snake_case(one) for one in classes]

    def tag(given: Any) -> str | None:
        if isinstance(given, _Choice):
            [found] = (one.alias for one in type(given).model_fields.values())
            return found
        if isinstance(given, BaseModel):
            return names[0]
        if isinstance(given, Mapping):
            return names[0] if not names[1:] else next((one for one in given if one in names), None)
        if isinstance(given, str) and not texts:
            return given if given in names else None
        return _PLAIN

    return tag
