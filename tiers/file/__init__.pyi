from . import slab
from .extents import BareSlab
from .file_io import PAGE, FileIO, Mode, write_all
from .slab_check import ReportProgress, SlabCheck, check_slab
from .slab_file import SLAB_NAME, open_slab, release
from .store import FileStore

__all__ = [
    "PAGE",
    "SLAB_NAME",
    "BareSlab",
    "FileIO",
    "FileStore",
    "Mode",
    "ReportProgress",
    "SlabCheck",
    "check_slab",
    "open_slab",
    "release",
    "slab",
    "write_all",
]
