"""`python -m warmd.cli` is `warmd`."""

import sys

from .main import main

sys.exit(main())
