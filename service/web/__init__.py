"""HTTP plumbing: the server's loop, the client, and the checks of every request."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
