"""How a configuration refuses a value: one line that names the field and the fix."""

from __future__ import annotations

import math


def require(condition: bool, message: str) -> None:
    """Refuse a user's value: `message` names the field and the fix."""
    if not condition:
        raise ValueError(message)


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    require(value in choices, f"{name}: {value!r} is not one of {', '.join(map(str, choices))}")


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
