"""
`topoalign draw`: pictures of machines.

`diagram` collects the content (sockets, NUMA nodes, the tree of PCIe switches, devices and their holders, NVLinks),
`layout` turns it into a scene of boxes, lines and texts, and `svg` and `png` write a scene as a file. `text` draws the
same diagram in characters, with a layout of its own.
"""
