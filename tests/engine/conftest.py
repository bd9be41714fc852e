"""The engine's tests use the tiny models of the integration tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
