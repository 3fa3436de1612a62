"""The declared streams of a project: the Python files of its streams folder, and each `defs.yaml` below it."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from highwater.declaration import Stream
from highwater.errors import ConfigurationError, DeclarationError
from highwater.settings import CHECKOUT, STREAMS_FOLDER, STREAMS_FOLDERS, list_projects
from highwater.stream_yaml import FILE, load_yaml


def find_streams_folder(
    environment: Mapping[str, str] = os.environ, start: Path | None = None, *, default: Path | None = None
) -> Path:
    """The streams folder of the project that a process works for.

    It is `HIGHWATER_STREAMS`, else the default, else `streams` or `assets/streams` in the nearest parent of the working
    folder that has a `workspace.yaml`.

    Args:
        environment: the process's environment variables.
        start: where the search starts; the working folder if None.
        default: the folder of a project that knows it, such as the one beside its definitions.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if given := environment.get(STREAMS_FOLDER):
        if Path(given).is_dir():
            return Path(given).absolute()
        raise ConfigurationError(
            f"{STREAMS_FOLDER} names no folder",
            found=given,
            remedy="set it to the folder with the files of the streams",
        )
    if default is not None:
        return default
    here = (start or Path.cwd()).absolute()
    for project in list_projects(here, *here.parents, CHECKOUT):
        return next(project / one for one in STREAMS_FOLDERS if (project / one).is_dir())
    raise ConfigurationError(
        f"no streams folder in {here} or above",
        remedy=f"run the command in a project (highwater init makes one), or set {STREAMS_FOLDER}",
    )


@dataclass(frozen=True)
class Declarations:
    """The streams of a folder, and the files that declare none because of a fault.

    Args:
        folder: the streams folder.
        streams: the streams by name.
        faults: by file its fault. Its streams are left out, and the others are served.
    """

    folder: Path
    streams: Mapping[str, Stream]
    faults: Mapping[Path, DeclarationError] = field(default_factory=dict)

    def describe_faults(self) -> list[str]:
        """Each fault with its values and its remedy in a line."""
        return [f"{file} is skipped: {one}" for file, one in self.faults.items()]


def read_streams(folder: Path | None = None) -> Declarations:
    """Read every file of a folder. A file with a fault hides no stream of another file.

    Two files that declare the same stream or topic are both at fault: nothing shows which one is right.

    Args:
        folder: where the files are; see `find_streams_folder` if None.

    Raises:
        ConfigurationError: there is no such folder.
    """
    where = folder or find_streams_folder()
    streams: list[tuple[Path, Stream]] = []
    faults: dict[Path, DeclarationError] = {}
    for file in (*sorted(where.glob("[!_]*.py")), *sorted(where.rglob(FILE))):
        try:
            found = load_yaml(file) if file.name == FILE else _load(file)
            for stream in found:
                _ensure_each_topic_once(file, stream)
        except DeclarationError as error:
            faults[file] = error
            continue
        streams += [(file, stream) for stream in found]
    for (earlier, other), (file, stream) in combinations(streams, 2):
        try:
            _ensure_apart(file, stream, earlier, other)
        except DeclarationError as error:
            faults.setdefault(file, error)
            faults.setdefault(earlier, error)
    sound = {stream.name: stream for file, stream in streams if file not in faults}
    return Declarations(where, sound, faults)


def load_streams(folder: Path | None = None) -> dict[str, Stream]:
    """The streams that the files of a folder declare, by name, if all of them can be read.

    Args:
        folder: where the files are, `defs.yaml` of components also in folders below; see `find_streams_folder` if None.

    Raises:
        DeclarationError: a file cannot be read or declares nothing, or two streams share a name or a topic, or a stream
            names a topic twice. The message names the file.
    """
    found = read_streams(folder)
    for error in found.faults.values():
        raise error
    return dict(found.streams)


def find_declared_stream(streams: Mapping[str, Stream], name: str) -> Stream:
    """The declared stream of that name.

    Raises:
        ConfigurationError: no stream has that name; the error lists the declared ones.
    """
    if name not in streams:
        raise ConfigurationError(
            f"no stream is named {name!r}",
            found=f"declared are {', '.join(sorted(streams)) or 'none'}",
            remedy="name one of them, or declare it in the streams folder",
        )
    return streams[name]


def _load(file: Path) -> list[Stream]:
    spec = importlib.util.spec_from_file_location(f"streams.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DeclarationError(f"{file.name} is no Python module", remedy="give the file a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except DeclarationError as error:
        problem = f"{file.name}: {error.problem}"
        raise DeclarationError(problem, stored=error.stored, found=error.found, remedy=error.remedy) from error
    except (Exception, SystemExit) as error:
        raise DeclarationError(
            f"{file.name} cannot be read as a declaration",
            stored=f"{file}",
            found=f"{type(error).__name__}: {error}",
            remedy="fix the file; docs/streams.md lists what a declaration may say",
        ) from error
    one, several = getattr(module, "STREAM", None), getattr(module, "STREAMS", None)
    if several is None:
        found, problem = [one], f"STREAM is {type(one).__name__}"
    else:
        listed = list(several) if isinstance(several, list | tuple) else [several]
        found = [*listed, *([] if one is None else [one])]
        problem = f"STREAMS has {', '.join(sorted({type(each).__name__ for each in found})) or 'nothing'}"
    streams = [each for each in found if isinstance(each, Stream)]
    if not found or len(streams) < len(found):
        raise DeclarationError(
            f"{file.name} declares no stream" if several is None else f"{file.name}: STREAMS is no list of streams",
            stored=f"{file}",
            found=problem,
            remedy="let the file hold STREAM = Stream(…), or STREAMS = [Stream(…), …]; docs/streams.md has an example",
        )
    return streams


def _describe_file(file: Path) -> str:
    """A file by its name, and by its folder where every file has the same name."""
    return f"{file.parent.name}/{file.name}" if file.name == FILE else file.name


def _ensure_apart(file: Path, stream: Stream, earlier: Path, other: Stream) -> None:
    taken = {"name": {other.name}, "topic": {*other.all_topics}}
    # Another stream may read what one publishes; two that write to one topic would mix their records.
    taken["topic to publish to"] = {*other.published_topics}
    mine_by_kind = {
        "name": (stream.name,),
        "topic": stream.all_topics,
        "topic to publish to": stream.published_topics,
    }
    for what, mine in mine_by_kind.items():
        for value in mine:
            if value in taken[what]:
                raise DeclarationError(
                    f"the {what} {value!r} is declared twice",
                    stored=f"in {_describe_file(earlier)}: stream {other.name} on topic {other.topic}",
                    found=f"in {_describe_file(file)}: stream {stream.name} on topic {stream.topic}",
                    remedy=f"give each stream a {what} of its own",
                )


def _ensure_each_topic_once(file: Path, stream: Stream) -> None:
    """A topic that is planned twice would have two slices by the same key."""
    for topic, times in Counter(stream.all_topics).items():
        if times > 1:
            raise DeclarationError(
                f"{_describe_file(file)}: stream {stream.name!r} has the topic {topic!r} {times} times",
                remedy="a foreign topic is none of the stream's own: not its main topic, a tier or the parked topic",
            )
