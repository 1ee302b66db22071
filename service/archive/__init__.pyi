from .archive import ArchiveProgress as ArchiveProgress
from .archive import export_blocks as export_blocks
from .archive import import_blocks as import_blocks
