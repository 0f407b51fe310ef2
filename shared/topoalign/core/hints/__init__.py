"""Hint providers: where, by CPU, memory or devices, a container could be placed. Names as in the kubelet."""
