"""The lowest tier that nodes share: runs of blocks as objects in an S3-compatible bucket."""

from kvtier.tiers.objects.store import LOOKED_AT, ObjectStore
