"""Optional packages: which of them are here, by the extras that this distribution declares."""

import re
import sys
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "zclip-heal"
FOR_DEVELOPERS = {"test", "dev", "docs"}
NAME = re.compile(r"[A-Za-z0-9._-]+")


def extras() -> dict[str, dict[str, str | None]]:
    """Return extra to package to installed version; None for a package that is missing."""
    return {
        extra: {package: version(package) for package in packages}
        for extra, packages in declared().items()
        if extra not in FOR_DEVELOPERS
    }


def declared() -> dict[str, list[str]]:
    """Return extra to packages, from the installed distribution or from the sources beside us."""
    found: dict[str, list[str]] = {}
    for requirement in metadata.requires(DISTRIBUTION) or [] if version(DISTRIBUTION) else []:
        package = NAME.match(requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if package and extra:
            found.setdefault(extra[1], []).append(package[0])
    return found or _declared_in_sources()


def _declared_in_sources() -> dict[str, list[str]]:
    path = Path(__file__).parent.parent / "pyproject.toml"
    if not path.exists():
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads(path.read_text())["project"]
    names = {
        extra: [NAME.match(requirement) for requirement in requirements]
        for extra, requirements in project["optional-dependencies"].items()
    }
    return {extra: [match[0] for match in found if match] for extra, found in names.items()}


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
