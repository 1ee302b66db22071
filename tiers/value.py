"""`value`: a dataclass that type checkers take for frozen, and that is made as fast as one that is not."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A class of a few fields that nobody changes, of which every step makes hundreds.

    `dataclass(frozen=True)` sets each field by a call of `object.__setattr__`: four times as long for five fields.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
