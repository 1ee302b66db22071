from .archive import export_blocks, import_blocks
from .copying import ArchiveProgress

__all__ = [
    "ArchiveProgress",
    "export_blocks",
    "import_blocks",
]
