"""The one parser of configuration: sections, values with units, TOML and the environment."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
