"""How a configuration refuses a value: one line that names the field and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable


def require(condition: bool, message: str) -> None:
    """Refuse a user's value: `message` names the field and the fix."""
    if not condition:
        raise ValueError(message)


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    require(value in choices, f"{name}: {_yaml(value, repr)} is not one of {', '.join(_yaml(choice, str) for choice in choices)}")


def _yaml(value: object, otherwise: Callable[[object], str]) -> str:
    """A list as a run file has it."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else otherwise(value)


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
