"""Ratios against peers, each printed by one command."""
