"""The `kvtier` command: one file for each family of verbs."""

from kvtier.cli.program import app, main

__all__ = ["app", "main"]
