"""What the process from which ranks are forked imports, once for all of them; it has one thread."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

from tests.support.imports import freeze_imports

freeze_imports()
