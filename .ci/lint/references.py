"""Rules of names that users type: each import path, command, option and public name of the pages is kvtier's."""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import kvtier
from kvtier.cli.program import VERBS, load
from kvtier.tiers.config.config import Config, is_reloadable, options
from lint.tree import Tree

ROOT: Final = Path(__file__).resolve().parents[2]  # what is imported, whatever tree is looked at
ENGINES: Final = ("vllm", "sglang", "cupy", "ray")  # not installed where this runs
FILES: Final = (".toml", ".sock", ".md", ".py", ".json", ".yml", ".html", ".log", ".svg", ".png")
# Words after "kvtier" in what it prints, and in labels of keys.
NO_COMMANDS: Final = ("router,", "closed:", "redis", "for ", "out ", "with ", "does ")
# What configurations of engines, packages and services name. `imports` looks at them, since docs/architecture.md does.
CONFIGURED: Final = (
    "kvtier.connector.vllm:KVTierConnector",
    "kvtier.connector.vllm:KVTierECConnector",
    "kvtier.connector.vllm_tier:KVTierSecondaryTier",
    "kvtier.connector.vllm.plugin:register",
    "kvtier.connector.sglang:KVTierStorage",
    "kvtier.connector.transformers:KVTier",
    "kvtier.cli:main",
    "kvtier.cli:app",
)


class Code(NamedTuple):
    """A piece of code in a page, and where it begins."""

    page: str
    line: int
    text: str


def code(tree: Tree) -> Iterator[Code]:
    """Code blocks whole, and inline code outside of them, of the pages for users."""
    for page in ("README.md", *tree.paths("docs/*.md")):
        line = 1
        for i, part in enumerate(re.split(r"(^```.*$)", tree.text(page), flags=re.MULTILINE)):
            if i % 4 == 2:
                yield Code(page, line, part)
            elif i % 4 == 0:
                for found in re.finditer(r"`([^`]+)`", part):
                    yield Code(page, line + part.count("\n", 0, found.start()), found[1])
            line += part.count("\n")


def imports(tree: Tree) -> Iterator[str]:
    """A path of kvtier's that a page names or imports can be imported, as far as its engine is installed."""
    for piece in code(tree):
        for path in tree.each(sorted(dotted(piece.text))):
            if complaint := astray(path):
                yield f"{piece.page}:{piece.line}: {complaint}"


def dotted(text: str) -> set[str]:
    """The dotted paths that it names or imports; `-t kvtier:TAG` is an image."""
    names = re.findall(r"(?<!-t )(?<![\w./@-])kvtier(?:[.:][A-Za-z_]\w*)+(?![\w/-])", text)
    found = {name.replace(":", ".") for name in names if not name.endswith(FILES)}
    for module, imported in re.findall(r"^\s*from (kvtier[\w.]*) import ([^\n(#]+|\([^)]+\))", text, re.MULTILINE):
        (statement,) = ast.parse(f"from {module} import {imported}").body
        assert isinstance(statement, ast.ImportFrom)
        found |= {f"{module}.{alias.name}" for alias in statement.names}
    return found


@cache
def astray(path: str) -> str:
    """Why nothing stands at a dotted path; "" if something does. Of what needs an engine, its class has to be there."""
    module, attributes = path, list[str]()
    while not _is_module(module):
        module, _, name = module.rpartition(".")
        attributes.insert(0, name)
    try:
        found: Any = importlib.import_module(module)
        for name in attributes:
            found = getattr(found, name)
    except AttributeError:
        return f"{path}: {module} has no {'.'.join(attributes)}"
    except ImportError as error:
        if not any(engine in str(error).lower() for engine in ENGINES):
            return f"{path}: {error}"
        folder = ROOT.joinpath(*re.sub("_tier$", "", module.removeprefix("kvtier.")).split("."))
        files = folder.glob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
        text = "".join(file.read_text() for file in files)
        missing = [name for name in attributes if not re.search(rf"^(class|def) {name}\b", text, re.MULTILINE)]
        return f"{path}: no file of {folder.relative_to(ROOT)} defines {missing}" if missing else ""
    return ""


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def commands(tree: Tree) -> Iterator[str]:
    """Every `kvtier VERB --option …` of a page is a verb of ours, with options that it has."""
    for piece in code(tree):
        for words in tree.each(sorted(typed(piece.text))):
            if complaint := _refused(words):
                yield f"{piece.page}:{piece.line}: kvtier {words}: {complaint}"


def typed(text: str) -> set[str]:
    """What stands behind each `kvtier`, up to the end of the line or of the command."""
    joined = re.sub(r"kubectl -n kvtier\b", "", text.replace("\\\n", " "))  # a namespace
    pattern = r"(?<!from)(?:^|[\s;|&\"(]|bin/)(?:kvtier|-m kvtier\.cli) ([a-z][\w-]*[^\n|;&#>]*)"
    return {words.strip() for words in re.findall(pattern, joined) if not words.startswith(NO_COMMANDS)}


def _refused(command: str) -> str:
    """Why our command line would not take it."""
    name, *words = command.split()
    if name not in VERBS:
        return "no such verb"
    verb = _verb(name)
    if hasattr(verb, "commands") and words and not words[0].startswith("-"):
        if words[0] not in verb.commands:
            return f"{name} has no {words[0]}"
        verb = verb.commands[words[0]]
    known = {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
    strange = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", command)) - known - {"--help"}
    return f"no option {', '.join(sorted(strange))}" if strange else ""


@cache
def _verb(name: str) -> Any:
    return load(name)


def api(tree: Tree) -> Iterator[str]:
    """docs/architecture.md lists public names and paths of configurations, docs/commands.md verbs in their order."""
    for page, what, start, wanted in (
        ("docs/architecture.md", "names", r"(\w+)`", sorted(kvtier.__all__)),
        ("docs/architecture.md", "paths", r"(kvtier[\w.:]+)`", sorted(CONFIGURED)),
        ("docs/commands.md", "verbs", r"kvtier (\w+)` \|", list(VERBS)),
    ):
        listed = list(tree.each(re.findall(rf"^\| `{start}", tree.text(page), re.MULTILINE)))
        if (listed if what == "verbs" else sorted(listed)) != wanted:
            stray = sorted({*listed} ^ {*wanted})
            yield f"{page}: its table of {what} is not kvtier's: {', '.join(stray) or 'the order'}"


def configuration(tree: Tree) -> Iterator[str]:
    """docs/configuration.md has a row for each option, with its default and its description; ↻: SIGHUP changes it."""
    page = tree.text("docs/configuration.md")
    defaults = Config().model_dump(mode="json")
    for section, name, field in tree.each(options()):
        default = defaults[section][name]
        shown = default if isinstance(default, str) else json.dumps(default).replace("null", "none")
        mark = " ↻" if is_reloadable(field) else ""
        row = f"| `[{section}] {name}`{mark} | `{shown}` | {field.description} |"
        if row not in page:
            yield f"docs/configuration.md: no row {row}"


def examples(tree: Tree) -> Iterator[str]:
    """The README and the engine's own page print one example of SGLang; `make test-sglang` runs it."""
    printed = [
        re.findall(r"```\n(python -m sglang\.launch_server .*?)```", tree.text(page), re.DOTALL)
        for page in ("README.md", "docs/sglang.md")
    ]
    for each in tree.each(printed):
        if len(each) != 1 or each != printed[0]:
            yield f"README.md, docs/sglang.md: their `python -m sglang.launch_server` is not one and the same: {each}"
