"""Rules of prose: sentences and tables are short, words are the field's, links, paths and names lead somewhere."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Final

from lint.tree import Tree

LONGEST_SENTENCE: Final = 25  # words; code and numbers between backticks count as one
WIDEST_TABLE: Final = 160  # characters
# How a longer sentence begins → why it stays one.
LONG_SENTENCES: Final[dict[str, str]] = {}
# Words that a reader has to stop at → what to write.
WORDS: Final = {
    r"mend(s|ed|ing)?": "fix",
    r"whither|whence|thereof|therein": "plain words",
    r"hush|told_blocks": "the field's term",
}
FOLDERS: Final = ("tiers", "connector", "engine", "service", "kvtier", "tests", "benchmarks", "deploy", "docs", ".ci")
# Answered in CONTRIBUTING.md, which the README links to, with files that have the code.
QUESTIONS: Final = (
    "Where is a block's checksum verified?",
    "What happens to a lease when a client dies?",
    "How do I add an eviction policy?",
)

_FENCED: Final = r"```.*?```"
_BREAK: Final = "\f"  # between two paragraphs that no empty line parts
# What is no running text → what stands for it: code blocks, generated figures, comments, tables, headings, the signs of
# a list, pictures, inline code.
_NO_PROSE: Final = {
    _FENCED: _BREAK,
    r"<!-- (?:figures:|printed) .*?<!-- end of [\w ]+ -->": _BREAK,
    r"<!--.*?-->": "",
    r"^[|#][^\n]*$": "",
    r"^ *(?:[-*]|\d+\.) ": _BREAK,
    r"!\[[^\]]*\]\([^)]*\)": "",
    r"`[^`]*`": "code",
}


def without(pattern: str, text: str, instead: str = "") -> str:
    """The text without what matches, of which the line breaks stay: every line keeps its number."""
    return re.sub(pattern, lambda found: "\n" * found[0].count("\n") + instead, text, flags=re.MULTILINE | re.DOTALL)


def line_at(text: str, offset: int) -> int:
    """The number of a line in its file."""
    return text.count("\n", 0, offset) + 1


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Running text, one paragraph or list item at a time, with the line where it begins."""
    for pattern, instead in _NO_PROSE.items():
        text = without(pattern, text, instead)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    start = 0
    for end in (*(gap.end() for gap in re.finditer(rf"\n\s*\n|{_BREAK}", text)), len(text)):
        piece = text[start:end]
        if told := " ".join(piece.split()):
            yield line_at(text, end - len(piece.lstrip())), told
        start = end


def words_in(sentence: str) -> int:
    """How many words a reader counts."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


@cache
def anchors(text: str) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ +(.*)$", without(_FENCED, text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def sentences(tree: Tree) -> Iterator[str]:
    """A sentence has at most 25 words."""
    for page in tree.pages:
        for line, paragraph in paragraphs(tree.text(page)):
            for sentence in tree.each(re.split(r"(?<=[.!?])[)*\"]*\s+", paragraph)):
                if words_in(sentence) > LONGEST_SENTENCE and not sentence.startswith(tuple(LONG_SENTENCES)):
                    yield f"{page}:{line}: {words_in(sentence)} words: {sentence}: make it two"


def words(tree: Tree) -> Iterator[str]:
    """Words are the field's own, in text, tables and headings."""
    for page in tree.each(tree.pages):
        text = tree.text(page)
        rows = re.finditer(r"^[|#].*$", text, re.MULTILINE)
        told = [*paragraphs(text), *((line_at(text, row.start()), re.sub(r"`[^`]*`", "", row[0])) for row in rows)]
        for line, paragraph in told:
            for word, instead in WORDS.items():
                for found in re.finditer(rf"\b({word})\b", paragraph):
                    yield f"{page}:{line}: {found[0]!r}: write {instead}"


def tables(tree: Tree) -> Iterator[str]:
    """A table is no wider than a screen."""
    for page in tree.pages:
        for number, line in enumerate(without(_FENCED, tree.text(page)).splitlines(), 1):
            if line.startswith("|"):
                tree.num_checked += 1
                if len(line) > WIDEST_TABLE:
                    yield f"{page}:{number}: {len(line)} characters, at most {WIDEST_TABLE}: move words below the table"


def links(tree: Tree) -> Iterator[str]:
    """A link leads to a file of ours, and to a heading that it has."""
    for page in tree.pages:
        text = without(_FENCED, tree.text(page))
        for found in tree.each(re.finditer(r"\]\((?!https?:)([^)\s]+)\)", text)):
            path, _, anchor = found[1].partition("#")
            file = (tree.root / page).parent / path if path else tree.root / page
            if not file.exists():
                yield f"{page}:{line_at(text, found.start())}: {found[1]}: no such file"
            elif anchor and anchor not in anchors(file.read_text()):
                yield f"{page}:{line_at(text, found.start())}: {found[1]}: no such heading"


def paths(tree: Tree) -> Iterator[str]:
    """A path between backticks that begins with a folder of ours exists; {a,b} are both, * and NAME some."""
    for page in tree.pages:
        text = tree.text(page)
        for found in tree.each(re.finditer(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*{{}},-]+)", text)):
            several = re.match(r"(.*)\{(.*)\}(.*)", found[1])
            for path in [several[1] + each + several[3] for each in several[2].split(",")] if several else [found[1]]:
                if not any(tree.root.glob(path.rstrip("/").replace("NAME", "*"))):
                    yield f"{page}:{line_at(text, found.start())}: {path}: no such path"


def names(tree: Tree) -> Iterator[str]:
    """Of `name` in `path.py`, with a few words between them, the file has the name."""
    for page in tree.pages:
        text = tree.text(page)
        for found in tree.each(re.finditer(r"`(\w+)`[\w\s]{0,40}\bin\s`(\w+/[\w./]+\.py)`", text)):
            if not (tree.root / found[2]).exists() or found[1] not in tree.text(found[2]):
                yield f"{page}:{line_at(text, found.start())}: {found[1]} is not in {found[2]}"


def folders(tree: Tree) -> Iterator[str]:
    """CONTRIBUTING.md lists every folder, from bottom to top, as ROWS of tests/test_architecture.py do."""
    table = tree.text("CONTRIBUTING.md").partition("| folder | job |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row]
    listed = [folder for cell in cells for folder in re.findall(r"`([\w/]+)/`", cell)]
    height = {folder: number for number, row in enumerate(_rows(tree)) for folder in row}
    for folder in sorted({*listed} ^ (height.keys() - {"kvtier"})):
        yield f"CONTRIBUTING.md: {folder}: stands in one of its table and ROWS; add it to the other"
    known = [folder for folder in tree.each(listed) if folder in height]
    if [height[folder] for folder in known] != sorted(height[folder] for folder in known):
        yield "CONTRIBUTING.md: the table of folders is not in the order of ROWS, bottom to top"


def _rows(tree: Tree) -> tuple[tuple[str, ...], ...]:
    """`ROWS` of the architecture test, which nothing imports here."""
    for node in ast.parse(tree.text("tests/test_architecture.py")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ROWS" and node.value is not None:
            rows: tuple[tuple[str, ...], ...] = ast.literal_eval(node.value)
            return rows
    raise ValueError("tests/test_architecture.py has no ROWS")


def questions(tree: Tree) -> Iterator[str]:
    """What newcomers ask is answered two hops from the README: in CONTRIBUTING.md, with three files at least."""
    if "(CONTRIBUTING.md)" not in tree.text("README.md"):
        yield "README.md: it has no link to CONTRIBUTING.md"
    page = tree.text("CONTRIBUTING.md")
    for question in tree.each(QUESTIONS):
        answer = page.partition(f"### {question}\n")[2].partition("\n#")[0]
        if len(re.findall(r"`[\w/]+\.py`", answer)) < 3:
            yield f"CONTRIBUTING.md: {question!r} has no answer that names three files"
