"""Checks the kubelet's device calls against the ledger: Allocate, GetPreferredAllocation, and PreStartContainer."""
