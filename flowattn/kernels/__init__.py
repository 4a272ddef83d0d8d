"""Attention and determinants computed fast: what `flowattn.attention` defines, with memory and derivatives by hand."""
