"""Programs that measure speed, accuracy and robustness. Run them from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # references and cases are in tests/helpers
