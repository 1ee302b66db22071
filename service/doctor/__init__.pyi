from .doctor import Verdict, examine, find_slabs, verify_slab, worst

__all__ = ["Verdict", "examine", "find_slabs", "verify_slab", "worst"]
