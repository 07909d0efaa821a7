"""`python -m peftkit_cli`, and `accelerate launch -m peftkit_cli train recipe.yaml`."""

import os
import sys

# -m searches the working folder first, where any file may have the name of a library's module
if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from peftkit_cli.app import main

if __name__ == "__main__":
    main()
