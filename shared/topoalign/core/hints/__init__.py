"""Hint providers find the NUMA nodes with CPUs, memory or devices for a container. Names are as in the kubelet."""
