"""`direct`: the members of an enumeration as plain attributes of its class.

Up to Python 3.11, `LoaderEvent.NEXT` is looked up by a method of the enumeration's metaclass, written in Python: four
times as long as an attribute, and a batch needs it some thirty times. Later versions do by themselves what this does.
"""

from __future__ import annotations

import enum
from typing import TypeVar

Kind = TypeVar("Kind", bound=type[enum.Enum])


def direct(kind: Kind) -> Kind:
    """Class decorator. Members stay what they are, and can be as little assigned to as before."""
    for name, member in kind.__members__.items():
        type.__setattr__(kind, name, member)
    return kind
