"""
Sets of NUMA nodes as masks: all subsets in the kubelet's order, and the search for those that meet several needs.

Hint providers and topology policies both use it. Their own packages define hints and policies.
"""
