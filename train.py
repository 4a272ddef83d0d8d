"""The door to the experiments: `make train`, or `python train.py --help`."""

import sys

from flowattn.experiments import demo

if __name__ == "__main__":
    demo.main(sys.argv[1:])
