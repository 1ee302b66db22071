"""What an engine talks to: an engine-neutral scheduler side, a worker side, and the plan that crosses between them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
