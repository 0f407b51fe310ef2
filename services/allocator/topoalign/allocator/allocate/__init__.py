"""The calls of the kubelet about devices, judged against the record: Allocate, GetPreferredAllocation, PreStartContainer."""
