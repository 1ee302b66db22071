"""The rule of licences: what a user installs with kvtier may be used and shipped freely."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lint.tree import Tree

OUR_OWN: Final = ("dev", "docs")  # extras that no user needs
FREE: Final = re.compile(r"\b(Apache|MIT|BSD|0BSD|ISC|PSF|Python Software|MPL|Zlib|CC0)\b")
BOUND: Final = re.compile(r"\b(A|L)?GPL|proprietary|non-?commercial", re.IGNORECASE)
UNSAID: Final = {"aeg": "its package names none; the library inside, libaegis, is under the MIT licence"}


def licences(tree: Tree) -> Iterator[str]:
    """Every package that a user gets, by dependency or extra, names a permissive licence, or is explained."""
    project = tomllib.loads(tree.text("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for name in extras.keys() - {*OUR_OWN} for each in extras[name])]
    for name, found in tree.each(sorted(_installed(wanted).items())):
        said = _licence(found)
        if name in UNSAID:
            if said:
                yield f".ci/lint/licences.py: {name} says {said!r} by now; take it out of UNSAID"
        elif BOUND.search(said) or not FREE.search(said):
            yield f"pyproject.toml: {name} has the licence {said or 'unsaid'!r}; use another package, or explain it"


def _installed(requirements: list[str]) -> dict[str, Distribution]:
    """The packages behind these requirements that are installed here, and what they need in turn, with their extras."""
    found, seen, left = dict[str, Distribution](), set[tuple[str, str]](), [*map(Requirement, requirements)]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:  # of another platform, or of a GPU
                continue
            needed = map(Requirement, found[name].requires or ())
            left += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return found


def _licence(found: Distribution) -> str:
    about = found.metadata
    classes = [each.rpartition("::")[2].strip() for each in about.get_all("Classifier") or () if "License ::" in each]
    return str(about.get("License-Expression") or "; ".join(classes) or about.get("License") or "").split("\n")[0]
