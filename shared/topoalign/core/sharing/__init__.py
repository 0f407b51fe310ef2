"""
Decisions about shares of GPUs: which card a container gets, of which it holds only some cores, memory or slots.

`cards` has what a decision knows of each card. Who holds what is in `state`.
"""
