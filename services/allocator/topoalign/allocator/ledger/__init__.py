"""
The record of a node's allocations: the ledger, its journal on disk, and the outbox that publishes the journal's facts.

The ledger is the only place that changes allocations. Changes are decided in `requests`, `allocate` and
`reconciliation`.
"""
