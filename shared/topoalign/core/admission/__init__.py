"""
Decides about a pod, from the request to the Admission or Refusal, and lists the alternatives that `explain` shows.

The hint providers, the policies and the placement are in packages of their own: `hints`, `policy`, `placement`.
"""
