from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import dev.jars
from dev.jars import CLOSURES, WANTED
from highwater.resources import jars
from highwater.resources.jars import LOCK, DownloadError, JarError, Module

A = Module("org.example", "a_2.13", "1.0")
B = Module("org.example.b", "b", "2.0-rc1")


class FakeIvy:
    """A test double of the network: gives the files it was given, and counts the calls."""

    def __init__(self, files: dict[Module, bytes]) -> None:
        self.files = files
        self.calls = 0

    def __call__(self, modules: Iterable[Module], work: Path, cache: Path, *, transitive: bool) -> dict[Module, Path]:
        self.calls += 1
        (work / "new").mkdir()
        for module in set(modules) & set(self.files):
            (work / "new" / module.file).write_bytes(self.files[module])
        return {module: work / "new" / module.file for module in set(modules) & set(self.files)}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "jars.lock"
    file.write_text(jars.write_lock({"spark": {A: digest(b"a"), B: digest(b"b")}}))
    return file


@pytest.fixture
def ivy(monkeypatch: pytest.MonkeyPatch) -> FakeIvy:
    fake = FakeIvy({A: b"a", B: b"b"})
    monkeypatch.setattr(jars, "resolve", fake)
    return fake


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_jars_are_put_in_place_whole_and_looked_at_once(tmp_path: Path, lock: Path, ivy: FakeIvy) -> None:
    place = jars.ensure_jars("spark", tmp_path / "tools", lock)
    assert jars.ensure_jars("spark", tmp_path / "tools", lock) == place
    assert names(place) == {"a_2.13-1.0.jar", "b-2.0-rc1.jar", "sizes", "complete"}
    assert ivy.calls == 1


def test_a_missing_jar_leaves_nothing_half_done_and_is_taken_up_again(tmp_path: Path, lock: Path, ivy: FakeIvy) -> None:
    del ivy.files[B]
    with pytest.raises(DownloadError, match=r"org\.example\.b:b:2\.0-rc1 was not fetched.*same command again"):
        jars.ensure_jars("spark", tmp_path / "tools", lock)
    assert not jars.build_jars_path("spark", tmp_path / "tools").exists()
    assert names(tmp_path / "tools") == {"spark.busy"}
    ivy.files[B] = b"b"
    assert "complete" in names(jars.ensure_jars("spark", tmp_path / "tools", lock))


def test_another_file_is_refused_with_both_checksums(tmp_path: Path, lock: Path, ivy: FakeIvy) -> None:
    ivy.files[A] = b"forged"
    with pytest.raises(JarError) as caught:
        jars.ensure_jars("spark", tmp_path / "tools", lock)
    assert (caught.value.stored, caught.value.found) == (digest(b"a"), digest(b"forged"))
    assert str(A) in caught.value.problem
    assert not jars.build_jars_path("spark", tmp_path / "tools").exists()


def test_a_forged_jar_leaves_the_cache_so_that_the_next_call_fetches_it(
    tmp_path: Path, lock: Path, ivy: FakeIvy
) -> None:
    cached = tmp_path / "tools" / "ivy" / "spark" / "org.example" / "a_2.13" / "jars" / "a_2.13-1.0.jar"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"forged")
    ivy.files[A] = b"forged"
    with pytest.raises(JarError):
        jars.ensure_jars("spark", tmp_path / "tools", lock)
    assert not cached.exists()


def test_a_new_lock_replaces_the_whole_set(tmp_path: Path, lock: Path, ivy: FakeIvy) -> None:
    jars.ensure_jars("spark", tmp_path / "tools", lock)
    lock.write_text(jars.write_lock({"spark": {A: digest(b"a")}}))
    assert names(jars.ensure_jars("spark", tmp_path / "tools", lock)) == {"a_2.13-1.0.jar", "sizes", "complete"}
    assert names(tmp_path / "tools") == {"jars", "spark.busy"}


@pytest.mark.parametrize(
    "harm",
    [
        lambda place: (place / A.file).unlink(),
        lambda place: (place / A.file).write_bytes(b""),
        lambda place: (place / "sizes").unlink(),
        lambda place: (place / "complete").unlink(),
    ],
    ids=["removed", "cut short", "sizes never recorded", "never compared with the lock"],
)
def test_a_set_that_was_harmed_is_fetched_again(
    tmp_path: Path, lock: Path, ivy: FakeIvy, harm: Callable[[Path], object]
) -> None:
    """Such a set counted as ready, and the JVM reported a class that was not found."""
    place = jars.ensure_jars("spark", tmp_path / "tools", lock)
    harm(place)
    jars.ensure_jars("spark", tmp_path / "tools", lock)
    assert {file.name: file.read_bytes() for file in place.glob("*.jar")} == {A.file: b"a", B.file: b"b"}
    jars.ensure_jars("spark", tmp_path / "tools", lock)
    assert ivy.calls == 2, "fetched again, and not again"


def test_the_lock_reads_as_it_was_written() -> None:
    locked = jars.read_lock(LOCK.read_text())
    assert jars.write_lock(locked) == LOCK.read_text()


def test_the_lock_has_what_the_code_asks_for() -> None:
    locked = jars.read_lock(LOCK.read_text())
    for name, wanted in WANTED.items():
        modules = {Module.parse(text) for text in wanted}
        assert modules <= set(locked[name])
        if name not in CLOSURES:
            assert modules == set(locked[name])


def test_the_lock_names_no_address() -> None:
    assert "//" not in LOCK.read_text()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "\t[SUCCESSFUL ] org.apache.kafka#kafka_2.13;4.3.1!kafka_2.13.jar (55ms)",
            "  org.apache.kafka:kafka_2.13:4.3.1",
        ),
        ("downloading http://localhost/kafka_2.13-4.3.1.jar ...", None),
        ("\tfound org.apache.kafka#kafka_2.13;4.3.1 in public", None),
    ],
)
def test_progress_shows_each_jar_and_no_address(line: str, shown: str | None) -> None:
    assert jars.format_progress(line) == shown


def test_progress_counts_the_bytes_of_unfinished_downloads(tmp_path: Path) -> None:
    (tmp_path / "org.example").mkdir()
    (tmp_path / "org.example" / "a.jar.part").write_bytes(b"12345")
    (tmp_path / "org.example" / "b.jar").write_bytes(b"123")
    assert jars.measure_partial_bytes(tmp_path) == 5


@pytest.mark.parametrize(("arguments", "fetched"), [([], {"broker", "spark", "tools"}), (["registry"], {"registry"})])
def test_a_set_on_demand_is_fetched_by_its_name(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], fetched: set[str]
) -> None:
    asked: set[str] = set()
    monkeypatch.setattr(dev.jars, "ensure", asked.add)
    assert dev.jars.main(arguments) == 0
    assert asked == fetched
    with pytest.raises(SystemExit):
        dev.jars.main(["no-such-set"])


def test_failed_downloads_are_reported_in_ivys_words() -> None:
    lines = ["found x", "\t\t:: org.example#b;2: not found", "\t::  UNRESOLVED DEPENDENCIES", "done"]
    assert jars.select_error_lines(lines) == [":: org.example#b;2: not found", "::  UNRESOLVED DEPENDENCIES"]


@pytest.mark.slow
def test_ivy_itself_retrieves_by_coordinates_and_reports_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real Ivy on a repository in a folder, so that no network is needed."""
    repository = tmp_path / "repository"
    put(repository, A)
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="folder"/><resolvers>'
        f'<ibiblio name="folder" m2compatible="true" root="{repository.as_uri()}/"/></resolvers></ivysettings>'
    )
    monkeypatch.setenv(jars.IVY_SETTINGS, str(settings))
    tools, lock = tmp_path / "tools", tmp_path / "jars.lock"
    lock.write_text(jars.write_lock({"spark": {A: jars.compute_sha256(jar_of(repository, A)), B: "0" * 64}}))
    with pytest.raises(DownloadError, match=r"org\.example\.b#b;2\.0-rc1"):
        jars.ensure_jars("spark", tools, lock)

    put(repository, B)
    lock.write_text(jars.write_lock({"spark": {m: jars.compute_sha256(jar_of(repository, m)) for m in (A, B)}}))
    place = jars.ensure_jars("spark", tools, lock)
    assert names(place) == {A.file, B.file, "sizes", "complete"}


def jar_of(repository: Path, module: Module) -> Path:
    return repository.joinpath(*module.group.split("."), module.artifact, module.version, module.file)


def put(repository: Path, module: Module) -> None:
    jar = jar_of(repository, module)
    jar.parent.mkdir(parents=True)
    with zipfile.ZipFile(jar, "w") as written:
        written.writestr("name", str(module))
    jar.with_suffix(".pom").write_text(
        f"<project><modelVersion>4.0.0</modelVersion><groupId>{module.group}</groupId>"
        f"<artifactId>{module.artifact}</artifactId><version>{module.version}</version></project>"
    )
