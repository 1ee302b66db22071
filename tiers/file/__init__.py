"""The slab: a tier in one mmap'd file per model."""

from kvtier.tiers.file import slab
from kvtier.tiers.file.about import closed_models, options_that_share, record_beside
from kvtier.tiers.file.extents import BareSlab
from kvtier.tiers.file.file_io import PAGE, FileIO, Mode, write_all
from kvtier.tiers.file.slab_check import ReportProgress, SlabCheck, check_slab
from kvtier.tiers.file.slab_file import SLAB_NAME, open_slab, release
from kvtier.tiers.file.store import FileStore
