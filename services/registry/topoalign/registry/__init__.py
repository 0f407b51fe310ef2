"""The registry: folds what all nodes announce and answers questions about the cluster over HTTP."""
