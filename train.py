"""Trains, evaluates and samples densities of sequences: `python train.py` says how."""

from flowattn.cli import main

if __name__ == "__main__":
    main()
