"""Entry point of `python -m glabench`."""

from glabench.cli import main

if __name__ == "__main__":
    main()
