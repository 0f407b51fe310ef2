"""
Decisions about shares of GPUs: which GPU a container gets, of which it holds only some cores, memory or slots.

`cards` has what a decision knows of each GPU, `choice` is the decision of topoalign itself, and `fitting` gives which GPUs
have enough; what limits and orders them is in `demand.card_rules`. `gaia` and `hami` decide as these systems do. Who holds
what is in `state`.
"""
