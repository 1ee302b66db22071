from .changes import MAX_NAMES, SharedChanges
from .forms import ClearForm, RecordForm, form_of, format_epoch, parse_epoch
from .life import OutcomeCounts, TierLife, cut_off

__all__ = [
    "MAX_NAMES",
    "ClearForm",
    "OutcomeCounts",
    "RecordForm",
    "SharedChanges",
    "TierLife",
    "cut_off",
    "form_of",
    "format_epoch",
    "parse_epoch",
]
