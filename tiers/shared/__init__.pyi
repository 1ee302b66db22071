from .changes import MAX_NAMES, SharedChanges
from .forms import ClearForm, RecordForm, form_of, format_epoch, parse_epoch
from .outcomes import cut_off

__all__ = [
    "MAX_NAMES",
    "ClearForm",
    "RecordForm",
    "SharedChanges",
    "cut_off",
    "form_of",
    "format_epoch",
    "parse_epoch",
]
