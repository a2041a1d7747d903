"""Loads the plugin for rank tests, for all tests: it also orders and selects them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["_ranks.plugin"]
