"""Pages are plain: short sentences, tables no wider than a screen, links and paths that lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from test_architecture import ROWS

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("[A-Z]*.md"), *ROOT.glob("docs/*.md")))
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


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def paragraphs(page: str) -> Iterator[str]:
    """Running text, one paragraph or list item at a time: no code, no tables, no headings, no generated figures."""
    text = re.sub(r"```.*?```", "\n\n", text_of(page), flags=re.DOTALL)
    text = re.sub(r"<!-- (figures:|printed) .*?<!-- end of [\w ]+ -->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    yield from (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip())


def sentences(page: str) -> Iterator[str]:
    for paragraph in paragraphs(page):
        yield from re.split(r"(?<=[.!?])[)*\"]*\s+", paragraph)


def words_in(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def anchors(page: str) -> set[str]:
    """What GitHub makes of the page's headings."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_checks_find_what_they_are_for() -> None:
    assert words_in("One two - `three`.") == 3
    assert {"README.md", "CONTRIBUTING.md", "docs/design.md"} <= set(PAGES)
    assert sum(1 for page in PAGES for _ in sentences(page)) > 500
    assert "configuration" in "".join(anchors("docs/configuration.md"))


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_too_long(page: str) -> None:
    long = [
        f"{words_in(sentence)} words: {sentence}"
        for sentence in sentences(page)
        if words_in(sentence) > LONGEST_SENTENCE and not sentence.startswith(tuple(LONG_SENTENCES))
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES)
def test_words_are_the_fields_own(page: str) -> None:
    text = " ".join(paragraphs(page)) + "\n".join(re.findall(r"^[|#].*$", text_of(page), re.MULTILINE))
    text = re.sub(r"`[^`]*`", "", text)
    found = [
        f"{match[0]!r}: write {instead}"
        for word, instead in WORDS.items()
        for match in re.finditer(rf"\b({word})\b", text)
    ]
    assert not found, found


@pytest.mark.parametrize("page", PAGES)
def test_tables_fit_on_a_screen(page: str) -> None:
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    wide = [f"{len(line)}: {line}" for line in text.splitlines() if line.startswith("|") and len(line) > WIDEST_TABLE]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(file.resolve().relative_to(ROOT).as_posix()):
            broken.append(f"{target}: no such heading")
    assert not broken, broken


@pytest.mark.parametrize("page", PAGES)
def test_paths_it_names_exist(page: str) -> None:
    """A path between backticks that begins with a folder of ours; {a,b} stands for both, * and NAME for some."""
    missing = []
    for name in re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*{{}},-]+)", text_of(page)):
        options = re.match(r"(.*)\{(.*)\}(.*)", name)
        for path in [options[1] + each + options[3] for each in options[2].split(",")] if options else [name]:
            if not list(ROOT.glob(path.rstrip("/").replace("NAME", "*"))):
                missing.append(path)
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES)
def test_names_are_in_the_files_it_says(page: str) -> None:
    """`name` in `path.py`, a few words between them: the file has that word."""
    places = re.findall(r"`(\w+)`[\w\s]{0,40}\bin\s`(\w+/[\w./]+\.py)`", text_of(page))
    assert not [f"{name} in {path}" for name, path in places if name not in (ROOT / path).read_text()]


def test_contributing_lists_every_folder_from_bottom_to_top() -> None:
    table = text_of("CONTRIBUTING.md").partition("| folder | job |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row]
    listed = [folder for cell in cells for folder in re.findall(r"`([\w/]+)/`", cell)]
    height = {folder: number for number, row in enumerate(ROWS) for folder in row}
    assert set(listed) == height.keys() - {"kvtier"}
    assert [height[folder] for folder in listed] == sorted(height[folder] for folder in listed)


QUESTIONS: Final = (
    "Where is a block's checksum verified?",
    "What happens to a lease when a client dies?",
    "How do I add an eviction policy?",
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_two_hops_from_the_readme(question: str) -> None:
    """The README links to CONTRIBUTING, which answers with files or links to a page that does."""
    assert "(CONTRIBUTING.md)" in text_of("README.md")
    answer = text_of("CONTRIBUTING.md").partition(f"### {question}\n")[2].partition("\n#")[0]
    assert len(re.findall(r"`[\w/]+\.py`", answer)) >= 3
