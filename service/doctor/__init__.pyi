from .doctor import examine
from .verify import Verdict, find_slabs, verify_slab, worst

__all__ = ["Verdict", "examine", "find_slabs", "verify_slab", "worst"]
