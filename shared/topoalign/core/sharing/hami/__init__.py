"""
Decides about shares as HAMi does: which GPUs of which node a pod gets, by count, memory and cores of each GPU.

A container's resources become a `HamiRequest` (`core.demand.shares`), a pod's annotations `GpuRules`, a
GPU a `HamiGpuUsage` (`hami_amounts`). `gpu_scores` orders the GPUs and chooses those of one container, `fit` checks
which of them can serve it and which MIG instances they become, `gpu_links` finds the best connected set. `place` goes
over the containers of a pod. `registration` and `node_annotations` read the annotations by which HAMi's components
communicate. topoalign writes none of them: what encodes a pod's GPUs is for the suite `hami/pod_annotation_codec` and
for tests.

Amounts are HAMi's: memory in MiB, cores in hundredths of a GPU, both of each GPU. Every order ends with NUMA node,
index and uuid, so that no tie is left to chance. Source of all rules: HAMi 4707fb02.
"""
