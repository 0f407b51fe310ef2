"""
The record against the kubelet's own: who holds what, what has ended, what was displaced, and what nobody recorded.

What is found is recorded by `ledger`; what the kubelet asks for is in `device_allocations`.
"""
