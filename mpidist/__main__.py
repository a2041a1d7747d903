"""``python -m mpidist`` is the command ``mpidist``."""

import sys

from mpidist.launcher import main

sys.exit(main())
