"""`python -m peftkit_cli`, and `accelerate launch -m peftkit_cli train recipe.yaml`."""

from __future__ import annotations

from peftkit_cli.app import main

if __name__ == "__main__":
    main()
