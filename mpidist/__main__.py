"""``python -m mpidist`` is the command ``mpidist``."""

import sys

from mpidist.cli import main

sys.exit(main())
