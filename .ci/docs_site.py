"""A hook of mkdocs: the site is the repository's own pages, where they lie, and a reference made of the docstrings.

mkdocs knows one folder of pages. Ours link to each other, to benchmarks' results and to sources by their paths in the
repository, so the site has the same paths. The reference lists what `kvtier/__init__.pyi` does: griffe reads copies of
those files alone, since it follows none of the links in `kvtier/`.
"""

import ast
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in BESIDE), *ROOT.glob("docs/*.md")]
_copies = tempfile.TemporaryDirectory()


def on_config(config: MkDocsConfig) -> None:
    """Where mkdocstrings finds sources."""
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_copies.name]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The site's files, instead of those of one folder."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = {path.resolve() for page in PAGES for path in (page, *_linked(page))}
    made = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in sorted(ours)]
    return Files([*of_theme, *made, File.generated(config, "docs/reference.md", content=_reference())])


def _linked(page: Path) -> Iterator[Path]:
    """Files that a page links to and that are no pages."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        if not target.endswith(".md"):
            yield page.parent / target


def _reference() -> str:
    """A heading and mkdocstrings' line for each public name, in the order of the stub."""
    homes = dict(_homes("kvtier"))
    for module in set(homes.values()):
        source = ROOT / f"{module.replace('.', '/')}.py"
        while source.is_relative_to(ROOT / "kvtier"):
            copy = Path(_copies.name) / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            source = (source.parent.parent if source.name == "__init__.py" else source.parent) / "__init__.py"
    glance = "[the public interface](architecture.md#public-interface)"
    lines = ["# Reference", "", f"The public names of kvtier; {glance} has them at a glance.", ""]
    for name, home in homes.items():
        lines += [f"::: {home}.{name}", ""]
    return "\n".join(lines)


def _homes(package: str) -> Iterator[tuple[str, str]]:
    """Each name of a face, and the module that defines it. A lazy face's names are in its stub."""
    folder = ROOT / package.replace(".", "/")
    stub = folder / "__init__.pyi"
    for node in ast.parse((stub if stub.exists() else folder / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith(f"{package}.")):
            module = f"{package}.{node.module}" if node.level else str(node.module)
            for alias in node.names:
                is_face = (ROOT / module.replace(".", "/") / "__init__.py").exists()
                yield alias.name, dict(_homes(module))[alias.name] if is_face else module
