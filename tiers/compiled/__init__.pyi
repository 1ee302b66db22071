from .extensions import digests, extension, status

__all__ = [
    "digests",
    "extension",
    "status",
]
