"""Extension modules of innermost loops: found if they were built of the source that stands here, never needed."""

from kvtier.tiers.compiled.extensions import extension, status
