"""The hardware of one node as a frozen graph: CPUs, NUMA nodes, PCIe bridges, GPUs, NICs and the links between them."""
