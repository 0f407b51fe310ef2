"""
Chooses GPUs as GaiaGPU does, including its known faults, for clusters that migrate from GaiaGPU (`compat`).

`pcie_tree` and `evaluators` have the rules of its device plugin, gpu-manager. `admission` has the rules of its
scheduler extender, gpu-admission. If the result of the original is random, the lowest minor number decides here.
"""
