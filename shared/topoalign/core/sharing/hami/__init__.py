"""
Decides about shares as HAMi does: which GPUs a pod gets, by the number of GPUs, and by memory and cores of each GPU.

`gpu_scores` orders the GPUs and chooses those of one container. `fit` checks which of them can serve it and which MIG
instances they become. `gpu_links` finds the best connected set. `registration` and `node_annotations` read the
annotations by which HAMi's components communicate; topoalign writes none of them.

HAMi counts memory in MiB and cores in hundredths of a GPU, both for each GPU. Every order ends with NUMA node, index
and uuid, so that no tie is resolved randomly. Source of all rules: HAMi 4707fb02.
"""
