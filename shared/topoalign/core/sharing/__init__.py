"""
Decides about shares of GPUs: which GPU a container gets if it requests only a part of the cores, memory or slots of a
GPU.

`shared_gpus` describes a GPU for these decisions. `choice` applies topoalign's own rules. `demand.share_annotations`
reads which GPUs a pod accepts, and in which order. `gaia` and `hami` apply the rules of these systems. `state` computes
who holds what.
"""
