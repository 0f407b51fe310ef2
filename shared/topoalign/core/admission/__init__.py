"""
Decides about a pod, from the request to the Admission or Refusal, and lists the alternatives that `explain` shows.

What is asked of hint providers, policies and placement on the way is in the packages of these names.
"""
