from .store import ObjectStore as ObjectStore
