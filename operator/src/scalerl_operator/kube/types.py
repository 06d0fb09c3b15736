"""Types of what the Kubernetes API gives and takes."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""

Key = tuple[str, str]
"""An object of one kind: (namespace, name)."""
