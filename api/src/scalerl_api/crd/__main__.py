"""``python -m scalerl_api.crd DIRECTORY`` writes the custom resource definition."""

import sys
from pathlib import Path

from scalerl_api.crd import FILE_NAME, text

path = Path(sys.argv[1]) / FILE_NAME
path.write_text(text(), encoding="utf-8")
print(path)
