from .worth import Worth, worth_from

__all__ = ["Worth", "worth_from"]
