"""Goes through the rules and prints a line for each: `python .ci/lint [--list] [--rule NAME …]`.

Exit status 1: something was found, or, where the variable CI is `true`, a rule could not run for a reason that
`.ci/allowed-skips` does not name.
"""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE = Path(__file__).resolve().parent
if not __package__:  # run as a folder: its files are known as `lint.…` alone
    sys.path[0] = str(HERE.parent)

from lint import deploy_files, fault_table, figures, licences, prose, references  # noqa: E402
from lint.tree import Rule, Skip, Tree  # noqa: E402

# Each with what it goes through, and how many of these there are at least.
RULES: Final = (
    # what is read
    Rule(prose.sentences, "sentences", 500),
    Rule(prose.words, "pages", 10),
    Rule(prose.tables, "lines of tables", 100),
    Rule(prose.links, "links", 100),
    Rule(prose.paths, "paths", 100),
    Rule(prose.names, "names"),
    Rule(prose.folders, "folders", 20),
    Rule(prose.questions, "questions", 3),
    # what is typed
    Rule(references.imports, "import paths", 12),
    Rule(references.commands, "commands", 50),
    Rule(references.api, "rows", 20),
    Rule(references.configuration, "options", 50),
    Rule(references.examples, "examples", 2),
    # what is promised
    Rule(fault_table.fault_tests, "tests", 80),
    Rule(fault_table.fault_rows, "rows", fault_table.FAULTS),
    Rule(fault_table.fault_stories, "stories", 20),
    # what was measured
    Rule(figures.figures, "pages and pictures", len(figures.WRITTEN)),
    Rule(figures.saved_tables, "tables"),
    Rule(figures.stories, "pages", 2),
    Rule(figures.drawing, "files"),
    Rule(figures.goals, "results", 20),
    Rule(figures.six, "figures", 6),
    Rule(figures.models, "rows", 120),
    # what is deployed
    Rule(licences.licences, "packages", 40),
    Rule(deploy_files.compose, "files", 2),
    Rule(deploy_files.docker_compose, "services", 10),
    Rule(deploy_files.workflow, "files"),
    Rule(deploy_files.systemd, "units"),
    Rule(deploy_files.kubernetes, "objects", 15),
    Rule(deploy_files.overlays, "objects", 100),
    Rule(deploy_files.chart, "objects", 15),
    Rule(deploy_files.prometheus, "rules"),
    Rule(deploy_files.alerts, "alerts"),
    Rule(deploy_files.panels, "questions", 10),
    Rule(deploy_files.grafana, "panels", 10),
)


def judged(rule: Rule, root: Path, must_run: bool) -> str:
    """The rule's line is printed, and what was found; returns ok, SKIP or FAIL."""
    tree = Tree(root)
    try:
        findings = rule.judge(tree)
    except Skip as skip:
        verdict = "FAIL" if must_run and not is_allowed(str(skip), tree) else "SKIP"
        print(f"{verdict} {rule.name}: {skip}")
        return verdict
    verdict = "FAIL" if findings else "ok"
    print(f"{verdict:4} {rule.name}: {tree.num_checked:,} {rule.things}")
    for finding in findings:
        print("     " + finding.replace("\n", "\n       "))
    return verdict


def is_allowed(reason: str, tree: Tree) -> bool:
    """Whether a machine may lack it: a line of the file matches from beginning to end."""
    lines = (line.partition("  #")[0].strip() for line in tree.text(".ci/allowed-skips").splitlines())
    return any(re.fullmatch(line, reason) for line in lines if line and not line.startswith("#"))


def main(arguments: Sequence[str] | None = None, root: Path = HERE.parent.parent) -> int:
    """See the top."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="say what each rule asks for, and check nothing")
    parser.add_argument("--rule", action="append", metavar="NAME", choices=[rule.name for rule in RULES])
    asked = parser.parse_args(arguments)
    chosen = [rule for rule in RULES if not asked.rule or rule.name in asked.rule]
    if asked.list:
        print("\n".join(f"{rule.name}: {(rule.find.__doc__ or '').splitlines()[0]}" for rule in chosen))
        return 0
    must_run = os.environ.get("CI") == "true"
    verdicts = Counter(judged(rule, root, must_run) for rule in chosen)
    print(f"{len(chosen)} rules: {verdicts['ok']} ok, {verdicts['FAIL']} failed, {verdicts['SKIP']} skipped")
    return 1 if verdicts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
