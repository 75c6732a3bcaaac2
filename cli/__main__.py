"""`python -m warmd.cli` is `warmd`."""

import sys

from .entry import main

sys.exit(main())
