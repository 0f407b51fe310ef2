"""
Chooses the devices, CPUs and memory of a container, once its NUMA affinity is known.

`gpus` has the device policies for GPUs, `partition` the search behind `best-effort`. On which NUMA nodes a container may be
is decided before, in `hints` and `policy`.
"""
