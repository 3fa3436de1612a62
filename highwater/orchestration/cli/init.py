"""The command `init`: a Dagster project that uses Highwater."""

from __future__ import annotations

import re
from pathlib import Path

import click

from highwater.errors import ConfigurationError
from highwater.orchestration.cli.terminal import print_lines

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "templates" / "project"
SUFFIX = ".template"
# Files whose names begin with a dot, which would be overlooked among the templates.
HIDDEN = ("gitignore", "dockerignore")
NAME = re.compile("[a-z][a-z0-9_-]*")


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def init(folder: Path) -> None:
    """Make a Dagster project in FOLDER: an example stream, definitions, workspaces, an image and a compose file.

    FOLDER is created; one that holds anything is refused. Its name becomes the project's: lower case letters, digits,
    _ and -, a letter first.
    """
    print_lines([f"made {made}" for made in make_project(folder)])
    print_lines([f"{folder / 'README.md'} has the next steps"])


def make_project(folder: Path) -> list[Path]:
    """Write the project's files.

    Returns:
        The files, in their order.

    Raises:
        ConfigurationError: the folder is not empty, is a file, or has a name that is no project's.
    """
    project = folder.absolute().name
    if not NAME.fullmatch(project):
        raise ConfigurationError(
            "the folder's name cannot be a project's name",
            found=project,
            remedy="take lower case letters, digits, _ and -, a letter first, such as my-project",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is not empty", remedy="name a folder that does not exist yet")
    return [_write(template, folder, project) for template in sorted(TEMPLATES.rglob(f"*{SUFFIX}"))]


def _write(template: Path, folder: Path, project: str) -> Path:
    from importlib.metadata import version

    name = template.name.removesuffix(SUFFIX)
    file = folder / template.relative_to(TEMPLATES).parent / (f".{name}" if name in HIDDEN else name)
    text = template.read_text().replace("@PROJECT@", project).replace("@VERSION@", version("highwater"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file
