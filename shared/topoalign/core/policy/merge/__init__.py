"""
Merges the providers' hints into one: as the kubelet does it, and as mode `best` does it.

`kubelet_merge` gives the kubelet's result, `narrowest_fit` is the merge of mode `best`. Which of them a topology
policy calls is in the policy's own module.
"""
