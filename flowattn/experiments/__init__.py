"""One module per figure or table, each with a `main`: ``python -m flowattn.experiments NAME``."""
