"""
Decides about shares of GPUs: which GPU a container gets if it requests only a part of a GPU's cores, memory or slots.

`shared_gpus` describes a GPU. `demand.share_annotations` reads which GPUs a pod accepts, and in which order. `choice`
applies topoalign's own rules, `gaia` and `hami` those of these systems. `state` computes who holds what.
"""
