"""
Merges the providers' hints into one, as the kubelet does or as mode `best` does.

`kubelet_merge` has the kubelet's merge, and `narrowest_fit` the merge of mode `best`. The module of each topology
policy defines which of them it calls.
"""
