"""`value`: a dataclass that type checkers take for frozen, and that is made as fast as one that is not."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A frozen class of few fields, made by hundreds: real `frozen=True` takes four times as long to make one."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
