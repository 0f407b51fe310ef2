"""
The record of a node's allocations: the ledger, its journal on disk, and the outbox that publishes the journal's facts.

Only the ledger changes allocations. Changes are decided in `requests`, `allocate` and `reconciliation`.
"""
