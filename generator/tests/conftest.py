"""Stand-ins that several test modules share are modules of this folder (``import actor_stand_ins``)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
