"""Types of Kubernetes objects."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as decoded JSON."""

Key = tuple[str, str]
"""(namespace, name) of an object of a known kind."""
