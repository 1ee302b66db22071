"""`python -m kvtier.cli`: the same as `kvtier`."""

from kvtier.cli import main

main()
