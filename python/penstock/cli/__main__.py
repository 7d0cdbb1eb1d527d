"""``python -m penstock.cli``: the same program where its script is not on the path."""

import sys

from penstock.cli import main

sys.exit(main())
