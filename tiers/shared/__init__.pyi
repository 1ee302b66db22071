from .changes import MAX_NAMES, SharedChanges
from .forms import ClearForm, RecordForm, form_of, format_epoch, parse_epoch
from .heads import MAC, derived, layout, packer
from .outcomes import cut_off

__all__ = [
    "MAC",
    "MAX_NAMES",
    "ClearForm",
    "RecordForm",
    "SharedChanges",
    "cut_off",
    "derived",
    "form_of",
    "format_epoch",
    "layout",
    "packer",
    "parse_epoch",
]
