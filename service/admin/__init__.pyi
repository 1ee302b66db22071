from .http_app import Pages
from .operator_token import token_at

__all__ = [
    "Pages",
    "token_at",
]
