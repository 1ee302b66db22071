"""Charts and tables of the verbs that measure: a PNG, or one HTML page that needs nothing else."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
