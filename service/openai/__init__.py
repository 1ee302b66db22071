"""The shapes of the OpenAI API: bodies, chats, prompts, errors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
