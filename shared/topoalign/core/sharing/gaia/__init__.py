"""
Chooses GPUs as GaiaGPU does, its known faults included: for clusters that come from it (`compat`).

`pcie_tree` and `evaluators` are those of its device plugin, gpu-manager; `admission` is what its scheduler extender,
gpu-admission, does on its own. Where the original's answer is random, the GPU with the lowest minor number decides.
"""
