"""
The record of a node's allocations: ledger, journal, and the outbox that publishes what the journal has.

The ledger is the only place that changes allocations. Changes are decided in `requests`, `allocate` and
`reconciliation`.
"""
