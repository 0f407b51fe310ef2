"""
Compares the ledger with the kubelet's answers: owners, ended containers, displaced containers, and unrecorded ones.

`ledger` records the results. `allocate` answers the kubelet's calls.
"""
