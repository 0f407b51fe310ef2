"""The registry: folds the facts of all nodes and answers questions about the cluster over HTTP."""
