"""Exit codes of the command."""

from typing import Final

DONE: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
NOT_FOUND: Final = 3
"""On a cluster: there is no such run or pod, or ScaleRL is not installed."""
FORBIDDEN: Final = 4
"""On a cluster: the user may not do it."""
INTERRUPTED: Final = 130
