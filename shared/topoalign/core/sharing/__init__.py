"""
Decides about shares of GPUs: which GPU a container gets that holds only some of its cores, memory or slots.

`shared_gpus` has what a decision knows of each GPU. `choice` decides by topoalign's own rules; which GPUs may be
chosen, and in which order, is in `demand.share_annotations`. `gaia` and `hami` decide as these systems do. Who holds
what is in `state`.
"""
