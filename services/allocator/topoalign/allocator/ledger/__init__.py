"""
The record of a node's allocations: ledger, journal, and the outbox that publishes what the journal has.

The ledger is the only place that changes allocations. Why they change is decided in `requests`, `device_allocations` and
`reconciliation`.
"""
