"""Every rule of `make lint`, in order, and what a machine may lack without failing."""

from typing import Final

from lint import deploy_files, fault_table, figures, prose, references
from lint.tree import Rule

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
    Rule(figures.policy_costs, "rows"),
    Rule(figures.block_files, "files", 50),
    Rule(figures.goals, "results", 20),
    Rule(figures.six, "figures", 6),
    Rule(figures.models, "rows", 120),
    # what is deployed
    Rule(deploy_files.compose, "files", 2),
    Rule(deploy_files.docker_compose, "services", 10),
    Rule(deploy_files.workflow, "files"),
    Rule(deploy_files.systemd, "units"),
    Rule(deploy_files.kubernetes, "objects", 15),
    Rule(deploy_files.overlays, "objects", 100),
    Rule(deploy_files.prometheus, "rules"),
    Rule(deploy_files.alerts, "alerts"),
    Rule(deploy_files.panels, "questions", 10),
    Rule(deploy_files.grafana, "panels", 10),
)
# What CI's machine may lack. All else it has: `make lint` installs promtool and docker-compose.
MAY_LACK: Final = frozenset({"kubectl is not installed", "systemd-analyze is not installed"})
