from .http_app import Pages

__all__ = [
    "Pages",
]
