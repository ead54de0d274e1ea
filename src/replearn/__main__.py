"""`python -m replearn`, which is what torchrun starts: torchrun -m replearn train RECIPE."""

from .cli import main

if __name__ == "__main__":
    main()
