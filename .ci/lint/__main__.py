"""Goes through the rules and prints a line for each: `python .ci/lint [--list] [--rule NAME …]`.

Exit status 1: something was found, or, where the variable CI is `true`, a rule could not run that should have.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if not __package__:  # run as a folder: its files are known as `lint.…` alone
    sys.path[0] = str(HERE.parent)

from lint.rules import MAY_LACK, RULES  # noqa: E402
from lint.tree import Rule, Skip, Tree  # noqa: E402


def judged(rule: Rule, root: Path, must_run: bool) -> str:
    """The rule's line is printed, and what was found; returns ok, SKIP or FAIL."""
    tree = Tree(root)
    try:
        findings = rule.judge(tree)
    except Skip as skip:
        verdict = "FAIL" if must_run and str(skip) not in MAY_LACK else "SKIP"
        print(f"{verdict} {rule.name}: {skip}")
        return verdict
    verdict = "FAIL" if findings else "ok"
    print(f"{verdict:4} {rule.name}: {tree.num_checked:,} {rule.things}")
    for finding in findings:
        print("     " + finding.replace("\n", "\n       "))
    return verdict


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
