"""The embedded schema registry, and the archive that it is unpacked from."""

from __future__ import annotations

import io
import tarfile
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dev.processes import LOOPBACK, accepts
from dev.registry import EmbeddedRegistry
from highwater.resources import jars
from highwater.resources.jars import Module

APP = Module("org.example", "app", "1.0.Final", "all", "tar.gz")
FILES = {"app-runner.jar": b"runner", "lib/a.jar": b"a"}


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as written:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            written.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    """What was asked of Ivy, which gives the archive; the lock is written too."""
    packed = archive(FILES)
    asked: list[Module] = []

    def resolve(modules: Iterable[Module], work: Path, cache: Path, *, transitive: bool) -> dict[Module, Path]:
        asked.extend(modules)
        (work / "new").mkdir()
        (work / "new" / APP.file).write_bytes(packed)
        return {APP: work / "new" / APP.file}

    monkeypatch.setattr(jars, "resolve", resolve)
    (tmp_path / "app.tar.gz").write_bytes(packed)
    digest = jars.compute_sha256(tmp_path / "app.tar.gz")
    (tmp_path / "jars.lock").write_text(jars.write_lock({"registry": {APP: digest}}))
    return asked


def test_an_archive_has_coordinates_like_gradles() -> None:
    text = "org.example:app:1.0.Final:all@tar.gz"
    assert Module.parse(text) == APP
    assert str(APP) == text
    assert APP.file == "app-1.0.Final-all.tar.gz"


def test_an_archive_is_unpacked_once_and_not_left_behind(tmp_path: Path, calls: list[Module]) -> None:
    place = jars.ensure_jars("registry", tmp_path / "tools", tmp_path / "jars.lock")
    jars.ensure_jars("registry", tmp_path / "tools", tmp_path / "jars.lock")

    unpacked = place / "app-1.0.Final-all"
    assert {str(f.relative_to(unpacked)): f.read_bytes() for f in unpacked.rglob("*") if f.is_file()} == FILES
    assert {file.name for file in place.iterdir()} == {unpacked.name, "sizes", "complete"}
    assert calls == [APP]


@pytest.mark.parametrize(
    "harm",
    [
        lambda unpacked: (unpacked / "lib" / "a.jar").unlink(),
        lambda unpacked: (unpacked / "app-runner.jar").write_bytes(b""),
    ],
    ids=["removed", "cut short"],
)
def test_an_unpacked_archive_that_was_harmed_is_fetched_again(
    tmp_path: Path, calls: list[Module], harm: Callable[[Path], object]
) -> None:
    unpacked = jars.ensure_jars("registry", tmp_path / "tools", tmp_path / "jars.lock") / "app-1.0.Final-all"
    harm(unpacked)
    jars.ensure_jars("registry", tmp_path / "tools", tmp_path / "jars.lock")
    assert (unpacked / "lib" / "a.jar").read_bytes() == b"a"
    assert (unpacked / "app-runner.jar").read_bytes() == b"runner"
    assert calls == [APP, APP]


@pytest.mark.slow
def test_ivy_itself_retrieves_an_archive_by_its_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real Ivy on a repository in a folder, so that no network is needed."""
    published = tmp_path / "repository" / "org" / "example" / "app" / "1.0.Final"
    published.mkdir(parents=True)
    (published / APP.file).write_bytes(archive(FILES))
    (published / "app-1.0.Final.pom").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>org.example</groupId>"
        "<artifactId>app</artifactId><version>1.0.Final</version></project>"
    )
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="folder"/><resolvers><ibiblio name="folder" m2compatible="true" '
        f'root="{(tmp_path / "repository").as_uri()}/"/></resolvers></ivysettings>'
    )
    monkeypatch.setenv(jars.IVY_SETTINGS, str(settings))
    lock = tmp_path / "jars.lock"
    lock.write_text(jars.write_lock({"registry": {APP: jars.compute_sha256(published / APP.file)}}))

    place = jars.ensure_jars("registry", tmp_path / "tools", lock)

    assert (place / "app-1.0.Final-all" / "lib" / "a.jar").read_bytes() == b"a"


@pytest.mark.slow
def test_the_registry_answers_on_its_port_until_it_is_stopped_and_starts_again_empty(tmp_path: Path) -> None:
    registry = EmbeddedRegistry(tmp_path)
    for _ in range(2):
        with registry:
            assert registry.url.startswith(f"http://{LOOPBACK}:{registry.port}/")
            with urllib.request.urlopen(f"{registry.url}/subjects", timeout=30) as answer:
                assert answer.read() == b"[]"
            body = b'{"schema": "\\"string\\""}'
            kind = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
            request = urllib.request.Request(f"{registry.url}/subjects/some/versions", body, kind)
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 200
        assert registry.pid is None
        assert not accepts(registry.port)
