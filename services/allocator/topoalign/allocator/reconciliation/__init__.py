"""
Compares the record with the kubelet's own: owners, ended containers, displaced containers, and unrecorded ones.

`ledger` records the results. `allocate` answers the kubelet's calls.
"""
