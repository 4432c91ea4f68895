import sys

from actionopd_jax.cli import main

sys.exit(main())
