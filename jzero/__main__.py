"""`python -m jzero` is the command `jzero`."""

import sys

from jzero.cli import main

sys.exit(main())
