from .changes import MAX_NAMES, SharedChanges
from .compressed import CompressedForm
from .forms import ClearForm, RecordForm, form_of, format_epoch, parse_epoch
from .outcomes import cut_off

__all__ = [
    "MAX_NAMES",
    "ClearForm",
    "CompressedForm",
    "RecordForm",
    "SharedChanges",
    "cut_off",
    "form_of",
    "format_epoch",
    "parse_epoch",
]
