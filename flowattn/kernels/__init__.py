"""How `flowattn.attention` is computed fast: derivatives by hand, in memory kept from call to call.

In reading order: `scratch`, the memory; `dot_products`, torch's fused attention; `fused_l2`, L2 attention through it;
`pairs`, which looks at each pair of tokens once; `pair_blocks`, the Jacobian between all pairs; `determinants` of small
matrices; `diagonal`, means and how they move with the token itself.
"""
