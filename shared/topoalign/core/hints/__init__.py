"""Hint providers: on which NUMA nodes CPUs, memory or devices for a container are available. Names as in the kubelet."""
