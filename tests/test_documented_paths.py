"""Every import path and every command that the documents name is there: users have them in their configurations."""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import kvtier
from kvtier.cli.verbs import VERBS, load

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
ENGINES: Final = ("vllm", "sglang", "cupy", "ray")  # not installed where these tests run
FILES: Final = (".toml", ".sock", ".md", ".py", ".json", ".yml", ".html", ".log", ".svg", ".png")

# Words after "kvtier" in what it prints, and in labels of keys.
NO_COMMANDS: Final = ("router,", "closed:", "redis", "for ", "out ", "with ", "does ")

# What configurations of engines, packages and services name; a document may or may not say so.
CONFIGURED: Final = (
    "kvtier.connector.vllm:KVTierConnector",
    "kvtier.connector.vllm_tier:KVTierSecondaryTier",
    "kvtier.connector.vllm.plugin:register",
    "kvtier.connector.sglang:KVTierStorage",
    "kvtier.connector.transformers:KVTier",
    "kvtier.cli:main",
    "kvtier.cli:app",
)


class Told(NamedTuple):
    """A piece of code in a document."""

    page: str
    text: str


def code() -> Iterator[Told]:
    """Code blocks whole, and inline code outside of them."""
    for path in PAGES:
        parts = re.split(r"^```.*$", path.read_text(), flags=re.MULTILINE)
        for i, part in enumerate(parts):
            pieces = [part] if i % 2 else re.findall(r"`([^`]+)`", part)
            yield from (Told(path.name, piece) for piece in pieces)


def documented_paths() -> set[tuple[str, str]]:
    """(page, dotted path) of everything of ours that a document names or imports; `-t kvtier:TAG` is an image."""
    found = set()
    for page, text in code():
        names = re.findall(r"(?<!-t )(?<![\w./@-])kvtier(?:[.:][A-Za-z_]\w*)+(?![\w/-])", text)
        found |= {(page, name.replace(":", ".")) for name in names if not name.endswith(FILES)}
        for module, imported in re.findall(r"^\s*from (kvtier[\w.]*) import ([^\n(#]+|\([^)]+\))", text, re.MULTILINE):
            (statement,) = ast.parse(f"from {module} import {imported}").body
            assert isinstance(statement, ast.ImportFrom)
            found |= {(page, f"{module}.{alias.name}") for alias in statement.names}
    return found


def documented_commands() -> set[tuple[str, str]]:
    """(page, arguments) of every `kvtier VERB …`, up to the end of the line or of the command."""
    found = set()
    for page, text in code():
        joined = re.sub(r"kubectl -n kvtier\b", "", text.replace("\\\n", " "))  # a namespace
        pattern = r"(?<!from)(?:^|[\s;|&\"(]|bin/)(?:kvtier|-m kvtier\.cli) ([a-z][\w-]*[^\n|;&#>]*)"
        commands = (arguments.strip() for arguments in re.findall(pattern, joined))
        found |= {(page, command) for command in commands if not command.startswith(NO_COMMANDS)}
    return found


def lead_to(path: str) -> Any:
    """What stands at a dotted path; None for what needs an engine that is not installed, once its class is found."""
    module, names = path, list[str]()
    while not is_module(module):
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    assert module, f"{path}: no such module"
    try:
        found: Any = importlib.import_module(module)
        for name in names:
            found = getattr(found, name)
    except ImportError as error:  # an AttributeError is a name that the face does not have
        if not any(engine in str(error).lower() for engine in ENGINES):
            raise
        folder = ROOT.joinpath(*re.sub("_tier$", "", module.removeprefix("kvtier.")).split("."))
        assert all(
            any(re.search(rf"^(class|def) {name}\b", file.read_text(), re.M) for file in folder.glob("*.py"))
            for name in names
        ), path
        return None
    return found


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def options_of(verb: Any) -> set[str]:
    return {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def test_documents_name_paths_and_commands_at_all() -> None:
    """The patterns above still find what they are for."""
    assert len({path for _, path in documented_paths()}) > 12
    assert len({arguments.split()[0] for _, arguments in documented_commands()} & set(VERBS)) > 12


@pytest.mark.parametrize("path", sorted({path for _, path in documented_paths()}))
def test_a_documented_path_leads_somewhere(path: str) -> None:
    lead_to(path)


@pytest.mark.parametrize("path", CONFIGURED)
def test_a_path_of_configurations_leads_somewhere(path: str) -> None:
    lead_to(path.replace(":", "."))


@pytest.mark.parametrize("page", [path.name for path in PAGES])
def test_every_documented_command_is_one(page: str) -> None:
    for arguments in sorted(arguments for where, arguments in documented_commands() if where == page):
        words = arguments.split()
        assert words[0] in VERBS, f"{page}: kvtier {arguments}"
        verb: Any = load(words[0])
        if hasattr(verb, "commands") and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in verb.commands, f"{page}: kvtier {arguments}"
            verb = verb.commands[words[1]]
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", arguments):
            assert option in options_of(verb), f"{page}: kvtier {arguments}: no option {option}"


def test_the_page_of_what_stays_lists_all_of_it() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    names, paths, commands = (
        re.findall(rf"^\| `{start}", page, re.MULTILINE) for start in (r"(\w+)`", r"(kvtier[\w.:]+)`", r"kvtier (\w+)")
    )
    assert sorted(names) == sorted(kvtier.__all__)
    assert sorted(paths) == sorted(CONFIGURED)
    assert commands == list(VERBS)
    assert all(getattr(kvtier, name) is not None for name in names)
