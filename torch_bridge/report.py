"""What is wrong with a folder: every problem at once, so that one attempt finds them all.

Problem       file, tensor, what was expected, what was found
BridgeError   a ValueError that lists problems, one a line
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def shown(text: object) -> str:
    """Text from a file as it may be printed: control characters and lone surrogates escaped, long text cut."""
    clean = "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode() for character in str(text)
    )
    return clean if len(clean) <= 200 else f"{clean[:197]}..."


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `tensor` is empty where the file as a whole is meant."""

    file: str
    tensor: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = f"{shown(self.file)}: {shown(self.tensor)}" if self.tensor else shown(self.file)
        return f"{where}: expected {shown(self.expected)}, found {shown(self.found)}"


class BridgeError(ValueError):
    """Everything wrong with `where`. The message is a report: a line that counts, then a line a problem."""

    def __init__(self, where: object, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        assert self.problems, "an error without a problem"
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{where}: {count}", *(f"  {problem}" for problem in self.problems)]))
