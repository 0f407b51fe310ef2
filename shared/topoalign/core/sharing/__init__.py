"""
Decisions about shares of GPUs: which card a container gets, of which it holds only some cores, memory or slots.

`cards` has what a decision knows of each card, `choice` is the decision of topoalign itself, `fitting` says which cards have
enough, and `rules` what limits and orders them. `gaia` and `hami` decide as these systems do. Who holds what is in `state`.
"""
