from .extensions import extension, status

__all__ = [
    "extension",
    "status",
]
