"""
Compares the ledger with the kubelet's answers. Finds the owners of allocations, and containers that have ended, are
displaced, or are not recorded.

`ledger` records the results. `allocate` answers the kubelet's calls.
"""
