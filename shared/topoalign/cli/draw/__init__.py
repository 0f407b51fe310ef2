"""
Drawing a machine: what people draw on a whiteboard when they talk about one.

`diagram` says what is to be seen (sockets, NUMA nodes, the tree of PCIe switches, devices and their holders, NVLinks),
`layout` turns that into a scene of boxes, lines and texts, and `svg` and `png` only write a scene down. `text` sets the
same diagram in characters, whose grid needs a layout of its own.
"""
